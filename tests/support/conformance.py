"""Schemathesis: what fits the description of an HTTP API and what does not, and its answers."""

from __future__ import annotations

from typing import Any

import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
EXAMPLES = 6  # of each kind


def try_operations(
    description: dict[str, Any], url: str, headers: dict[str, str], *, skip: tuple[str, ...] = ()
) -> dict[str, set[int]]:
    """Call every operation, as it is described and otherwise. The statuses that came, by name."""
    schema: Any = schemathesis.openapi.from_dict(description)
    operations = [found.ok() for found in schema.get_all_operations()]
    seen: dict[str, set[int]] = {}
    for operation in operations:
        name = operation.definition.raw["operationId"]
        if name not in skip:
            seen[name] = _statuses(operation, GenerationMode.POSITIVE, url, headers)
            if operation.body or operation.query:
                seen[name] |= _statuses(operation, GenerationMode.NEGATIVE, url, headers)
    return seen


def _statuses(operation: Any, mode: GenerationMode, url: str, headers: dict[str, str]) -> set[int]:
    statuses = set()

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode))
    def call(case: Any) -> None:
        answer = case.call(base_url=url, headers=headers, timeout=120)
        statuses.add(answer.status_code)
        case.validate_response(answer, checks=CHECKS)

    call()
    return statuses
