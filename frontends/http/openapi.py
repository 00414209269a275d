"""GET /openapi.json: the routes, their fields and their errors, made of the route table and the field table."""

from __future__ import annotations

import re
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from frontends.http.answer import JsonBytes
from frontends.http.field_table import Field, bodies
from frontends.http.service import Service
from inferengine import __version__
from inferengine.config import LimitsConfig
from inferengine.errors import KINDS

CLOSED = frozenset({"/infer/v1/completions"})  # routes that refuse a field they do not know
ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"enum": [*sorted(KINDS), "method_not_allowed"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


async def openapi(request: Request) -> Response:
    """Every route, its fields and their ranges."""
    service: Service = request.app.state.service
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    return JsonBytes(describe(routes, service.config.limits))


def describe(routes: list[Route], limits: LimitsConfig) -> dict[str, Any]:
    """The document, in OpenAPI 3.1."""
    tables = bodies(limits)
    paths: dict[str, Any] = {}
    for route in routes:
        path = re.sub(r":\w+}", "}", route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(route, path, method, tables)
    return {
        "openapi": "3.1.0",
        "info": {"title": "InferEngine", "version": __version__},
        "paths": paths,
        "components": {"schemas": {"Error": ERROR}},
    }


def body_schema(fields: list[Field], *, closed: bool = False) -> dict[str, Any]:
    """A JSON schema of a body; every field may also be null, which says nothing."""
    properties = {
        field.name: {**field.schema, "description": field.meaning}
        if field.required
        else {"anyOf": [field.schema, {"type": "null"}], "description": field.meaning}
        for field in fields
    }
    return {
        "type": "object",
        "properties": properties,
        "required": [field.name for field in fields if field.required],
        "additionalProperties": not closed,
    }


def _operation(route: Route, path: str, method: str, tables: dict[str, list[Field]]) -> dict[str, Any]:
    summary = (route.endpoint.__doc__ or "").strip().split("\n")[0]
    failed = {
        "description": "What is wrong, and with which field.",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}{re.sub('[^a-z0-9]+', '_', path.lower()).rstrip('_')}",
        **({"summary": summary} if summary else {}),
        "responses": {"200": {"description": "The answer."}, "4XX": failed, "5XX": failed},
    }
    names = re.findall(r"{(\w+)}", path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if method == "POST" and route.path in tables:
        schema = body_schema(tables[route.path], closed=route.path in CLOSED)
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation
