"""What clients send and get: OpenAI's forms, with our extensions. Types are strict: "5" is no number."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from ..decoding import Sampling
from .settings import MAX_ANSWERS, MAX_PROMPTS, ApiError, Settings

Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
DEFAULT_NEW_TOKENS = 16  # of a completion; a chat goes on to its end
StateName = Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")]
Zero = Annotated[float, Field(ge=0, le=0)]


def _is_false(value: bool) -> bool:
    if value:
        raise ValueError("need false")
    return value


OnlyFalse = Annotated[bool, AfterValidator(_is_false), Field(json_schema_extra={"const": False})]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool | None = Field(None, description="a last event with the counts of tokens")


def _whole(value: Any) -> Any:
    """JSON has one kind of numbers: 2.0 is an integer there."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return {name: _whole(each) for name, each in value.items()} if isinstance(value, dict) else value


class _Request(_Strict):
    model: str | None = Field(None, description="an id of GET /v1/models; the server's first one unless given")
    max_tokens: int | None = Field(None, ge=1, description="longest answer; at most --max-new-tokens")
    temperature: float | None = Field(None, ge=0, le=2, description="0 takes the likeliest token; 1 unless given")
    top_p: float | None = Field(None, gt=0, le=1, description="choose among the fewest tokens of this probability")
    n: int | None = Field(None, ge=1, le=MAX_ANSWERS, description="answers to each prompt; 1 unless given")
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = Field(None, description="a text, or up to 4 texts")
    seed: int | None = Field(None, description="the same seed gives the same answer; its last 63 bits count")
    stream: bool | None = Field(None, description="send the answer as server-sent events, as it is generated")
    stream_options: StreamOptions | None = None
    top_k: int | None = Field(None, ge=1, description="extension: choose among the k likeliest tokens")
    min_p: float | None = Field(None, ge=0, le=1, description="extension: leave out tokens rarer than this share")
    repetition_penalty: float | None = Field(None, gt=0, le=100, description="extension: above 1 makes repeats rarer")
    presence_penalty: Zero | None = Field(None, description="0 alone; see repetition_penalty")
    frequency_penalty: Zero | None = Field(None, description="0 alone; see repetition_penalty")
    user: str | None = Field(None, description="not used")

    @model_validator(mode="before")
    @classmethod
    def _numbers(cls, body: Any) -> Any:
        return _whole(body)

    def sampling(self) -> Sampling:
        return Sampling(
            1.0 if self.temperature is None else self.temperature, self.top_k, self.top_p, self.min_p,
            1.0 if self.repetition_penalty is None else self.repetition_penalty,
        )  # fmt: skip

    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())


class CompletionRequest(_Request):
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[Token], Field(min_length=1)]
        | Annotated[list[Annotated[list[Token], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
    ) = Field(description=f"a text, up to {MAX_PROMPTS} texts, a list of token ids, or up to {MAX_PROMPTS} such lists")
    logprobs: int | None = Field(None, ge=0, le=5, description="log probabilities, of so many likeliest tokens too")
    best_of: Annotated[int, Field(ge=1, le=1)] | None = Field(None, description="1 alone; see n")
    echo: OnlyFalse | None = Field(None, description="false alone: the prompt is not part of the answer")
    save_state: StateName | None = Field(
        None, description="extension: keep the state after the first answer under this name"
    )
    restore_state: StateName | None = Field(
        None, description="extension: the prompt goes on from the state of this name"
    )

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [each for each in self.prompt if not isinstance(each, int)]


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text, **({"name": self.name} if self.name else {})}


class ResponseFormat(_Strict):
    type: Literal["text"]


class ChatRequest(_Request):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, description="longest answer, as max_tokens")
    logprobs: bool | None = Field(None, description="log probabilities of the answer's tokens")
    top_logprobs: int | None = Field(None, ge=0, le=20, description="of so many likeliest tokens at each place")
    response_format: ResponseFormat | None = Field(None, description="text alone")


class PromptDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ModelEntry(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    loaded: bool = Field(description="extension: whether it is in memory")


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelEntry]


class Health(BaseModel):
    status: Literal["ok"]
    running: int
    waiting: int


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    error: ErrorDetails


def check_limits(request: _Request, settings: Settings) -> int:
    """The longest answer. What the schema cannot say, or says only of this server, is checked here."""
    asked = {"max_tokens": request.max_tokens}
    if isinstance(request, ChatRequest):
        asked["max_completion_tokens"] = request.max_completion_tokens
    for name, value in asked.items():
        if value is not None and value > settings.max_new_tokens:
            message = f"{name}={value}: need at most {settings.max_new_tokens} (--max-new-tokens of the server)"
            raise ApiError(400, message, param=name, code="max_tokens_exceeded")
    given = [value for value in asked.values() if value is not None]
    longest = settings.max_new_tokens if isinstance(request, ChatRequest) else DEFAULT_NEW_TOKENS
    return min(given) if given else min(longest, settings.max_new_tokens)


def refusal(errors: Sequence[Any], model: type[BaseModel] | None) -> ApiError:
    """What is wrong with a body, of pydantic's errors; the first that stands for itself."""
    first = errors[0]
    where = [part for part in first["loc"] if part != "body"]
    kind = first["type"]
    if kind == "json_invalid" or not where:
        what = "is not valid JSON" if kind == "json_invalid" else "is no JSON object"
        message = f"the body {what}; send an object, with Content-Type: application/json"
        return ApiError(400, message, code="invalid_json")
    name = str(where[0])
    fields = model.model_fields if model is not None else {}
    if kind == "extra_forbidden" and len(where) == 1:
        near = difflib.get_close_matches(name, fields, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the known ones are {', '.join(sorted(fields))}"
        return ApiError(400, f"unknown parameter {name!r}; {hint}", param=name, code="unknown_parameter")
    if kind == "missing" and len(where) == 1:
        return ApiError(400, f"the parameter {name!r} is missing", param=name, code="missing_parameter")
    about = fields[name].description if name in fields else None
    same = [error for error in errors if [part for part in error["loc"] if part != "body"][:1] == [name]]
    got = f"{first.get('input')!r}"
    got = got if len(got) <= 60 else got[:60] + "…"
    message = first["msg"].replace("Input should be", "need").replace("Value error, ", "")
    reason = f"need {about}" if len(same) > 1 and about else message
    place = ".".join(map(str, where)) if len(same) == 1 else name
    return ApiError(400, f"{place}={got}: {reason}", param=name, code="invalid_value")
