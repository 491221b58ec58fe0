"""Valid JSON for a message, made from its JSON schema: what fuzzing begins to change."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import BaseModel

# One of these fits every pattern of our messages.
_TEXTS = ("none", "a" * 32, "b" * 64, "c" * 128, "cpu", "127.0.0.1:8481", "")
_Schema = dict[str, Any]


def sample_messages(kind: type[BaseModel]) -> list[bytes]:
    """A short and a long value of one kind. What several fields must agree on may be wrong."""
    return [json.dumps(sample_value(kind, full=full)).encode() for full in (False, True)]


def sample_value(kind: type[BaseModel], *, full: bool) -> Any:
    """With all fields, or with just those that it needs."""
    schema = kind.model_json_schema()
    return _Sampler(schema.get("$defs", {}), full).value(schema)


class _Sampler:
    def __init__(self, definitions: dict[str, _Schema], full: bool) -> None:
        self._definitions, self._full = definitions, full

    def value(self, schema: _Schema) -> Any:
        if "$ref" in schema:
            return self.value(self._definitions[schema["$ref"].rpartition("/")[2]])
        if "const" in schema or "enum" in schema:
            return schema["const"] if "const" in schema else schema["enum"][0]
        if choices := schema.get("anyOf") or schema.get("oneOf"):
            return self.value(choices[0 if self._full else -1])
        make = getattr(self, f"_{schema.get('type', 'null')}")
        return make(schema)

    def _null(self, _: _Schema) -> None:
        return None

    def _boolean(self, _: _Schema) -> bool:
        return True

    def _integer(self, schema: _Schema) -> int:
        least = schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1)
        most = schema.get("maximum", schema.get("exclusiveMaximum", least + 8) - 1)
        return int(most if self._full else least)

    def _number(self, schema: _Schema) -> float:
        bounds = (schema[name] for name in ("maximum", "exclusiveMaximum") if name in schema)
        return min([2.5, *(bound / 2 for bound in bounds)])

    def _string(self, schema: _Schema) -> str:
        pattern, least = schema.get("pattern", ""), schema.get("minLength", 0)
        return next(
            text for text in _TEXTS if len(text) >= least and re.search(pattern, text) is not None
        )

    def _array(self, schema: _Schema) -> list[Any]:
        if "prefixItems" in schema:
            return [self.value(item) for item in schema["prefixItems"]]
        count = max(schema.get("minItems", 0), 1 if self._full else 0)
        return [self.value(schema["items"]) for _ in range(count)] if "items" in schema else []

    def _object(self, schema: _Schema) -> dict[str, Any]:
        if "properties" in schema:
            needed = schema.get("required", ())
            return {
                name: self.value(field)
                for name, field in schema["properties"].items()
                if self._full or name in needed or "const" in field
            }
        patterns = schema.get("patternProperties", {})
        inner = next(iter(patterns.values()), schema.get("additionalProperties"))
        if not self._full or not isinstance(inner, dict):
            return {}
        key = self._string({"pattern": next(iter(patterns), "")})
        return {key: self.value(inner)}
