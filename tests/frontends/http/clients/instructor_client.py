"""What every mode of instructor for OpenAI and Anthropic gets of a server. usage: instructor_client.py BASE_URL MODEL →
one JSON object: of each mode `parsed`, `text` (the server answered and the model wrote no such JSON), or the refusal.

`parsed` is certain where the mode states a schema or forces a tool. In the others the model has to know what to write.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Annotated, Any

import anthropic
import instructor
import openai
from instructor.core import IncompleteOutputException, InstructorRetryException
from pydantic import BaseModel, Field

MODES = (
    "FUNCTIONS",
    "TOOLS",
    "TOOLS_STRICT",
    "PARALLEL_TOOLS",
    "JSON",
    "JSON_O1",
    "MD_JSON",
    "JSON_SCHEMA",
    "RESPONSES_TOOLS",
    "RESPONSES_TOOLS_WITH_INBUILT_TOOLS",
    "ANTHROPIC_TOOLS",
    "ANTHROPIC_JSON",
    "ANTHROPIC_PARALLEL_TOOLS",
)
SCHEMA_IS_KEPT = ("FUNCTIONS", "TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "ANTHROPIC_TOOLS")
REFUSALS = (openai.APIStatusError, anthropic.APIStatusError)


class Person(BaseModel):
    """Somebody."""

    name: Annotated[str, Field(max_length=12)]
    age: Annotated[int, Field(ge=0, le=150)]


def tried(mode: instructor.Mode, base_url: str, model: str) -> str:
    """Return what became of one request in this mode."""
    if mode.name.startswith("ANTHROPIC"):
        root = base_url.removesuffix("/v1")
        client: Any = instructor.from_anthropic(
            anthropic.Anthropic(base_url=root, api_key="none", max_retries=0), mode=mode
        )
    else:
        client = instructor.from_openai(openai.OpenAI(base_url=base_url, api_key="none", max_retries=0), mode=mode)
    wanted: Any = Iterable[Person] if "PARALLEL" in mode.name else Person
    limit = "max_output_tokens" if "RESPONSES" in mode.name else "max_tokens"
    try:
        made = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Ada is 36 years old. Who is Ada?"}],
            response_model=wanted,
            max_retries=1,
            **{limit: 200},
        )
        list(made) if "PARALLEL" in mode.name else made.name
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, REFUSALS):
                return f"refused: {cause}"[:300]
            cause = cause.__cause__ or cause.__context__
        known = (InstructorRetryException, IncompleteOutputException, ValueError, TypeError)
        return "text" if isinstance(error, known) else f"failed: {error!r}"[:300]
    return "parsed"


def main(base_url: str, model: str) -> dict[str, str]:
    results = {name: tried(instructor.Mode[name], base_url, model) for name in MODES}
    for name, result in results.items():
        allowed = ("parsed",) if name in SCHEMA_IS_KEPT else ("parsed", "text")
        if result not in allowed:
            print(json.dumps(results))
            raise SystemExit(f"{name}: {result}")
    return results


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
