"""Errors as OpenAI's clients know them: a status, and a body with ``message``, ``type``, ``param`` and ``code``.

No message repeats what a client sent beyond the names of its fields: what comes back may be logged anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is refused.

    Args:
      status: of HTTP.
      message: what is wrong, and the way out.
      param: the field that it is about.
      code: a word for programs.
      headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    def body(self) -> dict[str, Any]:
        """Return the body as OpenAI shapes it."""
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return it as a response."""
        return JSONResponse(self.body(), self.status, dict(self.headers or {}))


FAULT = ApiError(500, "the server has a fault and could not answer; its log has more")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return a 400."""
    return ApiError(400, message, param=param, code=code)


def install(app: FastAPI) -> None:
    """Have every error of an app answered in OpenAI's shape."""
    app.add_exception_handler(ApiError, _of_ours)
    app.add_exception_handler(RequestValidationError, _of_validation)
    app.add_exception_handler(HTTPException, _of_http)
    app.add_exception_handler(Exception, _of_fault)


async def _of_ours(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return error.response()


async def _of_validation(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    # Where several forms are allowed each has errors of its own: the deepest is of the form that was meant.
    first = max(error.errors(), key=lambda one: len(one["loc"]))
    where = [str(part)[:100] for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return bad_request("the body is not JSON").response()
    unknown = first["type"] == "extra_forbidden"
    message = "is not supported; leave it out" if unknown else str(first["msg"])[:300]
    # Of the forms of a union pydantic names the one it tried, in words of ours: they are no part of the path.
    path = ".".join(part for part in where if part.isidentifier() or part.isdigit())
    if not path:
        return bad_request(f"the body must be a JSON object, sent as application/json: {message}").response()
    return bad_request(f"{path}: {message}", where[0]).response()


async def _of_http(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    messages = {
        400: "the body is not JSON in UTF-8",
        404: "there is no such endpoint",
        405: "the endpoint does not have this method",
    }
    message = messages.get(error.status_code) or HTTPStatus(error.status_code).phrase
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _of_fault(_: Request, __: Exception) -> JSONResponse:
    # Starlette raises it again after this, for ``Guard`` to report.
    return FAULT.response()
