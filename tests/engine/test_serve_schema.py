"""The OpenAPI document tells the truth, and no request that it allows, or nearly, is a 500."""

import json

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.engine.server_fixture import NAME, RunningServer

CHECKS = [
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
]
OPERATIONS = [
    ("/v1/completions", "POST", 40),
    ("/v1/chat/completions", "POST", 40),
    ("/v1/models", "GET", 2),
    ("/v1/models/{model_id}", "GET", 5),
    ("/requests/{request_id}", "GET", 5),
    ("/health", "GET", 2),
    ("/metrics", "GET", 2),
    ("/stats", "GET", 2),
    ("/", "GET", 2),
]


@pytest.fixture(scope="module")
def server():
    limits = {"max_model_len": 128, "num_blocks": 60}
    with RunningServer(config=limits, max_queued_requests=8) as running:
        yield running
        running.assert_idle()


@pytest.fixture(scope="module")
def schema(server):
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_the_document_names_all_routes_and_no_error_of_the_framework(server):
    document = server.get("/openapi.json")
    assert {
        (path, method.upper()) for path, item in document["paths"].items() for method in item
    } == {(path, method) for path, method, _ in OPERATIONS}
    text = json.dumps(document)
    assert "422" not in text and "HTTPValidationError" not in text
    for path in ("/v1/completions", "/v1/chat/completions"):
        responses = document["paths"][path]["post"]["responses"]
        assert responses.keys() == {"200", "400", "404", "413", "429", "500", "503"}
        assert responses["200"]["content"].keys() == {"application/json", "text/event-stream"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "path, prompt",
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_answers_whole_and_streamed_are_as_documented(schema, path, prompt, stream):
    fields = {"model": NAME, "max_tokens": 3, "n": 2, "logprobs": 1, "stream": stream} | prompt
    if "messages" in fields:
        fields |= {"logprobs": True, "top_logprobs": 2}
    headers = {"Content-Type": "application/json"}
    case = schema[path]["POST"].Case(body=fields, headers=headers, media_type="application/json")
    response = case.call(timeout=60)
    assert response.status_code == 200
    case.validate_response(response, checks=CHECKS)


@pytest.mark.parametrize("path, method, examples", OPERATIONS)
def test_generated_requests_get_documented_answers(schema, path, method, examples):
    operation = schema[path][method]

    @given(case=operation.as_strategy())
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case):
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = NAME  # a random name tests nothing but the 404
        response = case.call(timeout=60)
        case.validate_response(response, checks=CHECKS)

    check()
