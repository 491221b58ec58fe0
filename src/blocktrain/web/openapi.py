"""OpenAPI 3.1 descriptions of our HTTP APIs, made from the tables and messages that they follow."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from blocktrain.protocol.calls import BYTES, JSON, Argument, Call
from blocktrain.protocol.messages import PROTOCOL, Refusal
from blocktrain.web.guard import MOST_DIGITS

JsonObject = dict[str, Any]
_REF = "#/components/schemas/{model}"
_OBJECT: JsonObject = {"type": "object"}
_TEXTS: dict[str, JsonObject] = {  # arguments that are texts of one form
    "name": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
    "start": {"type": "string", "pattern": "^bytes=[0-9]{1,15}-$"},
}


@dataclass(frozen=True)
class Operation:
    """One call."""

    name: str
    method: str
    path: str
    about: str
    answer: type[BaseModel] | str = JSON
    """A message, or the content type of anything else."""
    request: type[BaseModel] | str = ""
    parameters: Sequence[JsonObject] = ()
    needs_key: bool = True
    statuses: Sequence[int] = (200,)
    also: str = ""
    """Another content type that an answer may have."""


def describe(
    title: str, operations: Iterable[Operation], error: type[BaseModel], version: str
) -> JsonObject:
    """The description as JSON."""
    rows = tuple(operations)
    messages = {row.request for row in rows} | {row.answer for row in rows} | {error}
    kinds = sorted((m for m in messages if isinstance(m, type)), key=lambda kind: kind.__name__)
    refs, schemas = models_json_schema([(k, "validation") for k in kinds], ref_template=_REF)
    known = {kind: schema for (kind, _), schema in refs.items()}

    def content(kind: type[BaseModel] | str) -> JsonObject:
        if isinstance(kind, type):
            return {JSON: {"schema": known[kind]}}
        return {kind: {"schema": _OBJECT if kind == JSON else {}}}

    def operation(row: Operation) -> JsonObject:
        good = content(row.answer) | ({row.also: {"schema": {}}} if row.also else {})
        answers = {str(status): {"description": "done", "content": good} for status in row.statuses}
        bad = {"description": "refused", "content": content(error)}
        body = {"requestBody": {"required": True, "content": content(row.request)}}
        return {
            "operationId": row.name,
            "summary": row.about,
            "parameters": list(row.parameters),
            **(body if row.request else {}),
            "responses": {**answers, "4XX": bad, "5XX": bad},
            **({"security": [{"key": []}, {}]} if row.needs_key else {}),
        }

    paths: dict[str, JsonObject] = {}
    for row in rows:
        paths.setdefault(row.path, {})[row.method.lower()] = operation(row)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {
            "schemas": schemas.get("$defs", {}),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def describe_calls(rows: Iterable[Call[Any]]) -> bytes:
    """The calls of a coordinator."""
    operations = [
        Operation(
            call.name,
            call.method,
            call.path,
            call.about,
            call.reply or call.content,
            call.request or call.body,
            [_parameter(argument) for argument in call.arguments],
            needs_key=call.needs != "nothing",
            statuses=(200, 206) if call.content == BYTES else (200,),
        )
        for call in rows
    ]
    title = "The calls of a BlockTrain coordinator"
    return json.dumps(describe(title, operations, Refusal, str(PROTOCOL))).encode()


def _parameter(argument: Argument) -> JsonObject:
    number: JsonObject = {"type": "integer", "minimum": 0, "maximum": 10**MOST_DIGITS - 1}
    plain = number if argument.kind is int else {"type": "string"}
    return parameter(
        argument.header or argument.name,
        argument.place,
        _TEXTS.get(argument.name, plain),
        required=argument.place == "path",
    )


def parameter(name: str, place: str, schema: JsonObject, *, required: bool) -> JsonObject:
    return {"name": name, "in": place, "required": required, "schema": schema}
