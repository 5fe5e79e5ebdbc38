"""Errors in the form of the OpenAI API, without tracebacks, paths or keys."""

from __future__ import annotations

from typing import Any

from foredraft.errors import (
    ConfigError,
    ContextLengthError,
    ForedraftError,
    NoTokenError,
    NumericsError,
    PromptError,
    shortened,
)

RETRY_SECONDS = 1
MODEL_CHANGED = "model_changed"
"""Code of the error of a request that was read for another model than the one served now; read anew, it can succeed."""
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """Error response of the OpenAI API.

    Args:
      status: HTTP status.
      message: text with the value, the limit and the remedy.
      param: name of the wrong field.
      code: code for programs; by default the status.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | int | None = None) -> None:
        message = shortened(message)
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def __reduce__(self) -> Any:
        return type(self), (self.status, self.message, self.param, self.code)

    @property
    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = TYPES.get(self.status, "server_error")
        code = self.status if self.code is None else self.code
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": code}}

    @property
    def headers(self) -> dict[str, str]:
        """When to come again and whether to, and how."""
        if self.status in (429, 503):
            return {"Retry-After": str(RETRY_SECONDS)}
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        if self.status == 415:
            return {"Accept-Encoding": "identity"}
        return {"x-should-retry": "false"} if self.status == 504 else {}

    @classmethod
    def of(cls, error: BaseException) -> ApiError:
        """Error as a client gets it: the whole message of a refusal, no details of any other error."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, ContextLengthError):
            return cls(400, str(error), "prompt", "context_length_exceeded")
        if isinstance(error, (PromptError, ConfigError)):
            return cls(400, str(error))
        if isinstance(error, MemoryError):
            return cls(503, "the server has no memory left for this request; try again, or ask for less")
        if isinstance(error, NoTokenError):  # no processors come over HTTP, so that the request contradicts itself
            return cls(400, str(error), code="no_token_possible")
        if isinstance(error, NumericsError):
            return cls(500, str(error), code="model_numerics")
        what = type(error).__name__ if isinstance(error, ForedraftError) else "an error"
        return cls(500, f"{what} inside the server ended this request; its log says more", code="internal_error")


def unauthorized() -> ApiError:
    return ApiError(
        401, "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'", code="invalid_api_key"
    )


def model_changed() -> ApiError:
    return ApiError(503, "another model is served from now on; try again", code=MODEL_CHANGED)


def loading() -> ApiError:
    return ApiError(503, "the model is still being loaded; try again shortly", code="loading")


def stopping() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down")
