"""Paths of other servers' APIs that clients ask for, and that this server does not have."""

_ONE_MODEL = "this server has one model, which it loaded when it was started"
_EMBEDDINGS = "this model generates text; embeddings are not supported"

# Path -> the reason
ABSENT = {
    "/api/copy": _ONE_MODEL,
    "/api/create": _ONE_MODEL,
    "/api/delete": _ONE_MODEL,
    "/api/pull": f"{_ONE_MODEL}; GET /api/tags has its name",
    "/api/push": _ONE_MODEL,
    "/api/embed": _EMBEDDINGS,
    "/api/embeddings": _EMBEDDINGS,
    "/api/v0/embeddings": _EMBEDDINGS,
}
