"""Errors in the format of the OpenAI API. Error responses contain no tracebacks, paths or keys."""

from __future__ import annotations

from typing import Any

from foredraft.errors import (
    ConfigError,
    ContextLengthError,
    NoTokenError,
    NumericsError,
    PromptError,
    shortened_message,
)

RETRY_SECONDS = 1
MODEL_CHANGED = "model_changed"
"""Error code of a request that was parsed for a model that has been replaced meanwhile. The server parses the request
again and retries."""
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
      code: machine-readable code; the status by default.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | int | None = None) -> None:
        message = shortened_message(message)
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def __reduce__(self) -> Any:
        return type(self), (self.status, self.message, self.param, self.code)

    @property
    def body(self) -> dict[str, Any]:
        """Error object of the response."""
        kind = TYPES.get(self.status, "server_error")
        code = self.status if self.code is None else self.code
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": code}}

    @property
    def headers(self) -> dict[str, str]:
        """Response headers that tell the client whether, when and how to retry."""
        if self.status in (429, 503):
            return {"Retry-After": str(RETRY_SECONDS)}
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        if self.status == 415:
            return {"Accept-Encoding": "identity"}
        return {"x-should-retry": "false"} if self.status == 504 else {}

    @classmethod
    def of(cls, error: BaseException) -> ApiError:
        """Return an error as clients may see it: the full message of a refusal, and no details of any other error."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, ContextLengthError):
            return cls(400, str(error), "prompt", "context_length_exceeded")
        if isinstance(error, (PromptError, ConfigError)):
            return cls(400, str(error))
        if isinstance(error, MemoryError):
            return cls(503, "the server is out of memory for this request; try again later, or send a smaller request")
        if isinstance(error, NoTokenError):  # HTTP requests carry no custom processors, so the request itself is wrong
            return cls(400, str(error), code="no_token_possible")
        if isinstance(error, NumericsError):
            return cls(500, str(error), code="model_numerics")
        message = "an error inside the server ended this request; see the server log for details"
        return cls(500, message, code="internal_error")


def unauthorized() -> ApiError:
    return ApiError(
        401, "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'", code="invalid_api_key"
    )


def model_changed() -> ApiError:
    return ApiError(503, "the served model was replaced while the request waited; try again", code=MODEL_CHANGED)


def loading() -> ApiError:
    return ApiError(503, "the model is still being loaded; try again shortly", code="loading")


def stopping() -> ApiError:
    return ApiError(503, "the server is shutting down; send the request to another server", code="shutting_down")
