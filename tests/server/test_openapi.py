"""The OpenAPI document, which the route table makes, and the page that shows it."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import pytest

from moeserve.server import openapi
from moeserve.server.routes import ROUTES

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}


async def test_openapi_lists_every_route(live):
    _, spec = await live.get("/openapi.json")
    assert spec["openapi"].startswith("3.2")
    listed = {
        (method.upper(), path.replace("{id}", ""))
        for path, ops in spec["paths"].items()
        for method in ops
    }
    assert listed == {(route.method, route.path + route.suffix) for route in ROUTES}
    schemas = spec["components"]["schemas"]
    assert "temperature" in schemas["ChatRequest"]["properties"]
    for ref in _refs(spec):
        assert ref.removeprefix("#/components/schemas/") in schemas


async def test_comments_beside_fields_describe_them(live):
    _, spec = await live.get("/openapi.json")
    schemas = spec["components"]["schemas"]
    for struct, field, text in (
        ("ExpertEngine", "mean_step_s", "the mean over about 64 such steps"),  # behind the field
        ("CompletionDetails", "rejected_prediction_tokens", None),
        ("ChatCompletionChunk", "usage", "in the last chunk, with stream_options.include_usage"),
        ("MessageAnswer", "stop_reason", "end_turn, max_tokens, model_context_window_exceeded, "),
        ("CompletionChoice", "stop_reason", None),
    ):
        shown = schemas[struct]["properties"][field].get("description")
        assert shown is None if text is None else shown.startswith(text), (struct, field, shown)


async def test_openapi_names_and_sums_up_every_operation(live):
    _, spec = await live.get("/openapi.json")
    operations = [operation for path in spec["paths"].values() for operation in path.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names) == len(ROUTES)
    assert all(operation["summary"].endswith((".", "(409).")) for operation in operations)
    chat = spec["paths"][CHAT]["post"]["responses"]["200"]["content"]
    event = chat["text/event-stream"]["itemSchema"]["properties"]["data"]["anyOf"]
    assert event[0]["contentSchema"]["$ref"].endswith("/ChatCompletionChunk")
    assert event[1]["const"] == "[DONE]"
    schemas = spec["components"]["schemas"]
    assert {"id", "object", "created", "model", "choices"} <= set(
        schemas["ChatCompletion"]["required"]
    )
    assert "prompt_token_ids" not in schemas["ChatCompletion"]["required"]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_openapi_bounds_are_the_real_ones(live, path):
    _, spec = await live.get("/openapi.json")
    kind = "ChatRequest" if path == CHAT else "CompletionRequest"
    needed = ASK if path == CHAT else {"prompt": "a", "max_tokens": 3}
    seen = 0
    for name, schema in spec["components"]["schemas"][kind]["properties"].items():
        shown = next(
            (one for one in schema.get("anyOf", []) if one.get("type") in ("integer", "number")), {}
        )
        extra = (
            {"logprobs": True} if name == "top_logprobs" else {"echo": True} if path != CHAT else {}
        )
        for bound, side in (("minimum", -1), ("maximum", 1), ("exclusiveMinimum", 0)):
            if bound in shown:
                seen += 1
                for value, status in ((shown[bound], 200), (shown[bound] + side, 400)):
                    if (name, bound, status) in ALLOWED_ELSEWHERE or (
                        bound == "exclusiveMinimum" and status == 200
                    ):
                        continue
                    got, answer, _ = await live.post(path, needed | extra | {name: value})
                    assert got == status, (name, bound, value, answer)
    assert seen > 20


ALLOWED_ELSEWHERE = {("min_tokens", "maximum", 200)}  # max_tokens bounds it, too


def _refs(node: object) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [ref for value in node.values() for ref in _refs(value)]
    return [ref for value in node for ref in _refs(value)] if isinstance(node, list) else []


async def test_openapi_tells_failures_by_status(live):
    _, spec = await live.get("/openapi.json")
    chat = spec["paths"][CHAT]["post"]["responses"]
    assert {"200", "400", "401", "404", "408", "413", "415", "503", "default"} <= chat.keys()
    for status, answer in chat.items():
        if status != "200":
            assert answer["content"]["application/json"]["schema"]["$ref"].endswith(
                "/ErrorResponse"
            )
    assert "Retry-After" in chat["503"]["headers"]
    assert {"403", "409"} <= spec["paths"]["/v1/admin/scale"]["post"]["responses"].keys()
    assert spec["paths"]["/livez"]["get"]["security"] == []


async def test_openapi_asks_for_a_key_where_the_server_does(launch):
    for settings, optional in (({}, True), ({"api_key": ("right",)}, False)):
        async with launch(**settings) as live:
            _, spec = await live.get("/openapi.json", X_Api_Key="right", **{"X-Api-Key": "right"})
            assert ({} in spec["security"]) == optional
            assert {name for one in spec["security"] for name in one} == set(
                spec["components"]["securitySchemes"]
            )


async def test_openapi_bounds_token_ids_by_the_vocabulary(live, launch):
    _, spec = await live.get("/openapi.json")
    ids = spec["components"]["schemas"]["DetokenizeRequest"]["properties"]["tokens"]["items"]
    last = ids["maximum"]
    for token, status in ((last, 200), (last + 1, 400), (ids["minimum"] - 1, 400)):
        assert (await live.post("/detokenize", {"tokens": [token]}))[0] == status
    async with launch(ready=False) as loading:
        _, spec = await loading.get("/openapi.json")
        assert (
            spec["components"]["schemas"]["DetokenizeRequest"]["properties"]["tokens"]["items"][
                "maximum"
            ]
            > last
        )


def _examples() -> list[tuple[str, str, object]]:
    spec = json.loads(openapi.document(ROUTES, None, keyed=False))
    found = []
    for path, operations in spec["paths"].items():
        for operation in operations.values():
            if (
                json_body := operation.get("requestBody", {})
                .get("content", {})
                .get("application/json")
            ):
                examples = json_body.get("examples", {})
                found += [(path, name, one["value"]) for name, one in examples.items()] or [
                    (path, "none", None)
                ]
    return found


@pytest.mark.parametrize(("path", "name", "body"), _examples())
async def test_openapi_examples_are_taken(live, path, name, body):
    assert body is not None, f"{path} has no example in assets/docs/examples.json"
    expected = (
        403 if "/admin/" in path else 404 if path == "/v1/batches" else 200
    )  # whose file is not there
    if "model" in body:
        body = body | {"model": live.front.model_name}
    async with live.session.post(live.url + path, json=body) as response:
        assert response.status == expected, await response.text()
        assert (b"[DONE]" in await response.read()) == (
            name == "a stream" and path != "/v1/responses"
        )


async def test_every_answer_has_what_the_document_says_it_has(live):
    _, spec = await live.get("/openapi.json")
    _, answer, _ = await live.post(CHAT, ASK)
    assert set(spec["components"]["schemas"]["ChatCompletion"]["required"]) <= answer.keys()
    chunk = spec["components"]["schemas"]["ChatCompletionChunk"]
    choice = spec["components"]["schemas"]["ChatChunkChoice"]
    for event in await live.events(CHAT, ASK):
        assert set(chunk["required"]) <= event.keys() <= chunk["properties"].keys()
        for one in event["choices"]:
            assert set(choice["required"]) <= one.keys() <= choice["properties"].keys()


async def test_the_docs_run_their_own_script_and_load_nothing_from_elsewhere(live):
    async with live.session.get(live.url + "/docs") as response:
        text = await response.text()
        policy = response.headers["Content-Security-Policy"]
    assert response.content_type == "text/html"
    assert policy.startswith("default-src 'none'; connect-src 'self'; ")
    for tag in ("style", "script"):
        (body,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "://" not in text
    assert "innerHTML" not in text


def test_an_upload_is_described_as_a_form():
    spec = json.loads(openapi.document(ROUTES, None, keyed=False))
    (kind,) = spec["paths"]["/v1/files"]["post"]["requestBody"]["content"].items()
    assert kind == ("multipart/form-data", {"schema": {"$ref": "#/components/schemas/FileForm"}})
    form = spec["components"]["schemas"]["FileForm"]
    assert form["properties"]["purpose"] == {"enum": ["batch"]}
    assert form["properties"]["file"]["format"] == "binary"
    assert form["required"] == ["purpose", "file"]


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/files/x/content", "GET"),
        ("/v1/files/x", "GET, DELETE"),
        ("/v1/batches/x/cancel", "POST"),
        ("/v1/responses/compact", "POST"),
    ],
)
async def test_allow_has_the_methods_of_that_path_only(live, path, allowed):
    async with live.session.options(live.url + path) as response:
        assert (response.status, response.headers["Allow"]) == (405, allowed)
