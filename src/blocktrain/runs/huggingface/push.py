"""A model to the Hugging Face hub, by the hub's own client."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2

from blocktrain.errors import BlockTrainError, ConfigError, Unreachable
from blocktrain.runs.folder import read_manifest
from blocktrain.runs.huggingface.export import CODE, export_run, fusion_block
from blocktrain.terminal import bar, console

if TYPE_CHECKING:
    from huggingface_hub import HfApi

FIRST_SECONDS = 10.0  # for the first answer of the hub
SECONDS = 120.0  # for later ones: a commit takes its time
STALE = ["model*.safetensors", "model.safetensors.index.json"]  # of an earlier upload
TOKEN_HELP = "run `hf auth login`, or set HF_TOKEN to a token that may write"


def push_run(folder: Path, name: str, *, private: bool = False) -> str:
    """Upload a run, or a folder that was exported before, as one commit; its address on the hub.

    Files that the hub has already are not sent again, so a push that broke off can be repeated.
    """
    if not is_export(folder):
        fusion_block(read_manifest(folder))  # it can be exported
    api = connect(name)
    with explained(name):
        repository = api.create_repo(name, private=private, exist_ok=True)
        if private and not api.model_info(repository.repo_id).private:
            raise ConfigError(
                f"{repository.repo_id} is public on the hub, and --private does not change that; "
                "choose another name, or make it private on its page"
            )
    with files_of(folder, repository.repo_id) as files, explained(name):
        api.upload_folder(
            repo_id=repository.repo_id,
            folder_path=files,
            delete_patterns=STALE,
            commit_message="Upload of a BlockTrain model",
        )
    return f"{api.endpoint}/{repository.repo_id}"


def connect(name: str) -> HfApi:
    """The client of the hub, if the name is possible, the hub answers, and it knows the token."""
    try:
        import huggingface_hub.utils
    except ImportError:
        raise ConfigError(
            "the hub's client is not here: pip install 'blocktrain[hub]', and push again"
        ) from None
    utils: Any = huggingface_hub.utils  # it does not list all that it documents
    utils.logging.set_verbosity_error()  # its errors become a sentence of ours
    huggingface_hub.set_client_factory(
        lambda: httpx2.Client(follow_redirects=True, timeout=httpx2.Timeout(SECONDS, connect=10))
    )
    if not console.is_terminal:
        utils.disable_progress_bars()
    api = huggingface_hub.HfApi()
    with explained(name, first=True):
        utils.validate_repo_id(name)
        if huggingface_hub.constants.is_offline_mode():
            raise Unreachable("HF_HUB_OFFLINE is set: unset it to push to the hub")
        session = huggingface_hub.get_session()
        usual, session.timeout = session.timeout, httpx2.Timeout(FIRST_SECONDS)
        api.whoami()
        session.timeout = usual
    return api


def is_export(folder: Path) -> bool:
    """Whether `export_run` made this folder."""
    return (folder / CODE[0]).is_file()


@contextmanager
def files_of(folder: Path, name: str) -> Iterator[Path]:
    """The exported folder itself, or an export of the run that is deleted afterwards."""
    if is_export(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix=".push-", dir=folder) as temporary:
        out = Path(temporary) / "model"
        with bar("exporting") as progress:
            export_run(folder, out, name=name, progress=progress)
        yield out


@contextmanager
def explained(name: str, *, first: bool = False) -> Iterator[None]:
    """What the client raises, as one sentence with the fix. The first call writes nothing yet."""
    from huggingface_hub import errors, get_token

    try:
        yield
    except BlockTrainError:
        raise
    except errors.HFValidationError:
        raise ConfigError(
            f"{name!r} cannot be a name on the hub: write MODEL or OWNER/MODEL with letters, "
            "digits, '-', '_' and '.'"
        ) from None
    except errors.LocalTokenNotFoundError:
        raise ConfigError(f"there is no token for the hub: {TOKEN_HELP}") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status == 401:
            which = "this token" if get_token() else "you"
            raise ConfigError(f"the hub does not know {which}: {TOKEN_HELP}") from None
        if status in (403, 404) and not first:
            raise ConfigError(
                f"this token may not write to {name}: use a token with write access, "
                "or the name of an owner that you belong to"
            ) from None
        reason = " ".join((error.server_message or f"status {status}").split())[:200]
        raise Unreachable(f"the hub refused: {reason}; push again later") from None
    except (httpx2.HTTPError, OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise Unreachable(
            f"the hub does not answer as it should ({reason}): check the network and push again; "
            "what was uploaded is not sent again"
        ) from None
