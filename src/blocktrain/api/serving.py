"""Serving a model from a script: the API and the page of `blocktrain serve`, in a thread."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Self, Unpack

from blocktrain.api.model import TrainedModel
from blocktrain.api.options import ServeOptions, refuse_unknown, take_flags
from blocktrain.cli.serve import AnswerFlags, ApiFlags, RouteFlags, serve_entry
from blocktrain.web.server import AppServer, run_loop


class ModelServer:
    """A server in a thread. Leave its `with` block, or call `close`, to stop it."""

    def __init__(
        self,
        model: TrainedModel,
        hosts: RouteFlags,
        api: ApiFlags,
        answers: AnswerFlags,
        *,
        reference: bool = False,
    ) -> None:
        self.model = model.folder.resolve().name
        """The name of the model in requests."""
        self.url = ""
        """Of the page; the API is below /v1."""
        self._run, self._hosts, self._api, self._answers = model, hosts, api, answers
        self._reference = reference
        self._server: AppServer | None = None
        self._failure: BaseException | None = None
        self._known = threading.Event()  # whether it serves, or why not
        self._thread = threading.Thread(target=self._serve, name="serve", daemon=True)
        self._thread.start()
        self._known.wait()
        if self._failure is not None:
            raise self._failure

    def _serve(self) -> None:
        try:
            run_loop(self._serving())
        except BaseException as error:  # raised again where it was started
            self._failure = error
        finally:
            self._known.set()

    async def _serving(self) -> None:
        run, listen = self._run, self._api.parse()
        entry = self._hosts.entry(
            run.folder, reference=self._reference, device=run.device, threads=run.threads
        )
        try:
            rules = self._api.rules(
                self.model, self._answers.defaults(entry), self._answers.template(run.folder)
            )
            await serve_entry(entry, rules, listen, self._on_start)
        finally:
            await entry.aclose()

    def _on_start(self, server: AppServer) -> None:
        self._server, self.url = server, server.url
        self._known.set()

    def close(self) -> None:
        """Finish the answers that have begun, and stop."""
        if self._server is not None:
            self._server.stop()
        self._thread.join()

    def wait(self) -> None:
        """Serve until it is stopped, for example by Ctrl-C."""
        while self._thread.is_alive():
            self._thread.join(0.5)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.model} at {self.url}>"


def serve(
    model: TrainedModel | Path | str,
    listen: str = "127.0.0.1:0",
    **options: Unpack[ServeOptions],
) -> ModelServer:
    """Serve a model here, or from the stages of a route. Port 0 takes a free port.

    Options are the flags of the command: `route`, `api_keys`, `mode`, `chat_template` and so on.
    """
    trained = model if isinstance(model, TrainedModel) else TrainedModel(Path(model))
    flags: dict[str, Any] = {"listen": listen, **options}
    hosts, api, answers = (
        take_flags(RouteFlags, flags),
        take_flags(ApiFlags, flags),
        take_flags(AnswerFlags, flags),
    )
    reference = bool(flags.pop("reference", False))
    refuse_unknown(flags, ServeOptions)
    return ModelServer(trained, hosts, api, answers, reference=reference)
