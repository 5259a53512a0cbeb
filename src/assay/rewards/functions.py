"""Users' reward functions as judges, in three signatures: one answer, all answers to a prompt (TRL), or verl's.

Users' classes and functions are imported by "package.module:name" or "path/to/file.py:name". Objects of a Python
program, such as a reward function in a notebook, get a path as well: "python-HASH:name". It can be loaded as long as
the program runs; HASH is of the object's source.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import itemgetter
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Literal

from assay.system.awaiting import attempt, is_async, then
from assay.types import INVALID_REWARD, Status, UserError, Verdict, describe_user_error, is_valid_reward, plural

MAX_TEXT = 10_000  # characters of `parsed` and `detail` of a user's function
NOT_APPLICABLE = "the reward function returned None: it does not apply to this answer"  # as in TRL
PROMPT_FIELDS = ("messages", "solution")  # of a prompt; passed to judges that ask for them (`wants_prompt`)
SIGNATURES = (
    "f(completion, answer, **fields) for one answer, f(completions, prompts, **columns) for all answers to a prompt as "
    "in TRL, or f(data_source, solution_str, ground_truth, extra_info) as in verl"
)
_STRING_USED_AS_MESSAGES = ("string indices must be integers", "string index out of range", "'str' object has no attr")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Signature:
    """How a user's function is called."""

    convention: Literal["assay", "trl", "verl"] = "assay"
    names: frozenset[str] | None = None  # of its parameters; None: it takes any
    required: tuple[str, ...] = ()  # parameters without a default, beyond those that the convention fills
    conversational: bool = False  # TRL: its annotation says that completions are lists of messages

    def chosen(self, values: Mapping[str, Any], excluded: Sequence[str] = ()) -> dict[str, Any]:
        """Return the values that the function takes. Raises TypeError if one that it needs is missing."""
        missing = [name for name in self.required if name not in values]
        if missing:
            known = ", ".join(sorted(values)) or "none"
            raise TypeError(
                f"the reward function needs '{missing[0]}', which the problem does not have; known: {known}"
            )
        return {
            name: value
            for name, value in values.items()
            if name not in excluded and (self.names is None or name in self.names)
        }


@dataclass(frozen=True)
class FunctionJudge:
    """Calls the user's `def reward(completion: str, answer: str, **fields) -> float | dict | Verdict`, plain or async.

    `path` is "package.module:function" or "file.py:function", from which worker processes import it. A function without
    `**fields` gets only the fields that it names. A number of at least 1.0 means status ok, a smaller one wrong. A dict
    has `reward` and optionally `status`, `parsed`, `parts` and `detail`. If the function raises, returns anything else
    or a reward that is not finite, the status is error.

    A function with a parameter `completions` is called as in TRL, with all answers to a prompt; one with a parameter
    `solution_str` is called as in verl.
    """

    path: str

    def __post_init__(self) -> None:
        split_path(self.path)  # reports a wrong path now
        object.__setattr__(self, "path", normalized(self.path))  # valid in every working directory
        self.prepare()  # reports a wrong signature now, not once per completion

    @classmethod
    def of(cls, function: Callable[..., Any]) -> FunctionJudge:
        """Judge with a function of this program."""
        return cls(register_function(function))

    def __reduce__(self) -> Any:
        """To a worker process, a function of this program is sent by value."""
        function = registered(self.path)
        return (FunctionJudge, (self.path,)) if function is None else (FunctionJudge.of, (function,))

    def prepare(self) -> None:
        _function(self.path)

    @property
    def sees_group(self) -> bool:
        return _function(self.path)[1].convention == "trl"

    @property
    def wants_prompt(self) -> bool:
        signature = _function(self.path)[1]
        return self.sees_group or not (signature.names or frozenset()).isdisjoint(PROMPT_FIELDS)

    @property
    def is_async(self) -> bool:
        return is_async(_function(self.path)[0])

    def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Any:
        """Judge one answer; the verdict has to be awaited if the function is `async`."""
        function, signature = _function(self.path)
        if signature.convention == "trl":
            return then(self.judge_group([completion], answer, fields), itemgetter(0))

        def call() -> Any:
            if signature.convention == "verl":
                values = {"data_source": "", "extra_info": dict(fields), **fields}
                chosen = signature.chosen({**values, "solution_str": completion, "ground_truth": answer})
                return then(function(**chosen), _verl_verdict)
            chosen = signature.chosen(fields, excluded=("completion", "answer"))
            return then(function(completion, answer, **chosen), as_verdict)

        return attempt(call, _error_verdict, Exception)

    def judge_group(self, completions: Sequence[str], answer: str, fields: Mapping[str, Any]) -> Any:
        """Judge all answers to a prompt with one call of a function in TRL's signature."""
        function, signature = _function(self.path)

        def call() -> Any:
            rewards = _call_trl(function, signature, completions, answer, fields)
            return then(rewards, lambda rewards: [_verdict_or_error(reward) for reward in rewards])

        return attempt(call, lambda error: [_error_verdict(error) for _ in completions], Exception)


def register_function(function: Any) -> str:
    """Return a path for a function, or other code, of this program."""
    path = register(function)
    _function.cache_clear()  # another function may have had this path: a closure with another object in it
    return path


def judge_at(path: str) -> Any:
    """The judge that a setting names: an object with the interface of `Judge`, or a function, which becomes one."""
    value = registered(path)
    parameters = [] if value is None or inspect.isroutine(value) else (_parameters(value) or [])
    is_judge = len(parameters) == 3 and parameters[2].name == "fields" and parameters[2].kind in _POSITIONAL
    return value if is_judge or hasattr(value, "judge_group") else FunctionJudge(path)


def _error_verdict(error: BaseException) -> Verdict:
    return Verdict(0.0, Status.ERROR, detail=describe_user_error(error))


def _call_trl(
    function: Callable[..., Any],
    signature: Signature,
    completions: Sequence[str],
    answer: str,
    fields: Mapping[str, Any],
) -> Any:
    """Call a function with lists, as TRL does; the columns are the answer, the solution and the fields of the prompt.

    TRL passes strings, or lists of messages if its dataset is conversational. A function that is not annotated gets
    strings, and lists of messages if it uses a string as such a list.
    """
    count = len(completions)
    values = {"answer": answer, **{name: value for name, value in fields.items() if name != "messages"}}
    columns = {name: [value] * count for name, value in signature.chosen(values).items()}
    messages = list(fields.get("messages") or ())

    def call(prompt: Any, answers: Sequence[Any]) -> Any:
        given = {"prompts": [prompt] * count, "completions": list(answers)}
        if signature.names is not None and "prompts" not in signature.names:
            del given["prompts"]
        return then(function(**given, **columns), lambda result: _as_list(result, count))

    def call_with_messages(error: BaseException | None = None) -> Any:
        if error is not None and not any(text in str(error) for text in _STRING_USED_AS_MESSAGES):
            raise error
        return call(messages, [[{"role": "assistant", "content": completion}] for completion in completions])

    if signature.conversational:
        return call_with_messages()
    question = "\n".join(message["content"] for message in messages)
    return attempt(lambda: call(question, completions), call_with_messages, (TypeError, IndexError, AttributeError))


def _as_list(result: Any, count: int) -> list[Any]:
    if isinstance(result, str | bytes | Mapping) or not hasattr(result, "__iter__"):
        raise TypeError(f"a reward function with `completions` must return a list of numbers, not {result!r:.80}")
    rewards = list(result)
    if len(rewards) != count:
        raise ValueError(
            f"the reward function returned {plural(len(rewards), 'reward')} for {plural(count, 'completion')}"
        )
    return rewards


def _verdict_or_error(reward: Any) -> Verdict:
    if reward is None:
        return Verdict(0.0, Status.ERROR, detail=NOT_APPLICABLE)
    return attempt(lambda: as_verdict(reward), _error_verdict, Exception)


def _verl_verdict(result: Any) -> Verdict:
    """Convert a number, or a dict with `score`, optionally `acc` (whether it is correct), `pred`, and other numbers."""
    if not isinstance(result, Mapping):
        return as_verdict(result)
    if "score" not in result:
        raise ValueError(f"the dict of a reward function as in verl needs 'score'; got {sorted(map(str, result))}")
    parts = {name: value for name, value in result.items() if isinstance(value, int | float) and name != "score"}
    verdict = as_verdict({"reward": result["score"], "parts": parts, "parsed": result.get("pred")})
    if "acc" in result:
        verdict.status = Status.OK if result["acc"] else Status.WRONG
    return verdict


def as_verdict(result: Any) -> Verdict:
    """Convert what a user's function returned. Raises TypeError or ValueError if it is invalid."""
    verdict = result if isinstance(result, Verdict) else _new_verdict(result)
    if not is_valid_reward(verdict.reward):
        raise ValueError(f"the reward function returned {verdict.reward:g}, which {INVALID_REWARD}")
    return verdict


def _new_verdict(result: Any) -> Verdict:
    values = result if isinstance(result, Mapping) else {"reward": result, "parts": {"accuracy": result}}
    if "reward" not in values or set(values) - {"reward", "status", "parsed", "parts", "detail"}:
        raise ValueError(
            "a reward function's dict needs 'reward' and may have 'status', 'parsed', 'parts', 'detail'; "
            f"got {sorted(map(str, values))}"
        )
    reward = _number(values["reward"])
    status = Status(values.get("status", Status.OK if reward >= 1.0 else Status.WRONG))
    parsed = None if values.get("parsed") is None else str(values["parsed"])[:MAX_TEXT]
    parts = {str(name): _number(value) for name, value in (values.get("parts") or {}).items()}
    return Verdict(reward, status, parsed, parts, str(values.get("detail", ""))[:MAX_TEXT])


def _number(value: Any) -> float:
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"a reward function must return a number, a dict or a Verdict, not {type(value).__name__}")
    return float(value)


@lru_cache(maxsize=32)
def _function(path: str) -> tuple[Callable[..., Any], Signature]:
    function = load_object(path)
    if not callable(function):
        raise UserError(f"'{path}' is not a function but a value of type {type(function).__name__}")
    parameters = _parameters(function)
    return function, Signature() if parameters is None else _signature(path, parameters)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        return None


def _signature(path: str, parameters: Sequence[inspect.Parameter]) -> Signature:
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [parameter for parameter in parameters if parameter.kind in by_name]
    all_names = frozenset(parameter.name for parameter in named)
    names = None if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters) else all_names
    required = [parameter.name for parameter in named if parameter.default is parameter.empty]
    if "completions" in all_names:
        annotation = str(next(parameter.annotation for parameter in named if parameter.name == "completions"))
        conversational = any(word in annotation for word in ("dict", "Dict", "Message", "Mapping"))
        filled = ("prompts", "completions")
        return Signature("trl", names, tuple(name for name in required if name not in filled), conversational)
    if "solution_str" in all_names:
        return Signature("verl", names, tuple(required))
    positional = [parameter for parameter in parameters if parameter.kind in _POSITIONAL]
    takes_any = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    if len(positional) < 2 and not takes_any:
        stated = ", ".join(str(parameter).partition(":")[0] for parameter in parameters)
        raise UserError(f"'{path}' takes ({stated}), but a reward function must be {SIGNATURES}")
    first_two = {parameter.name for parameter in positional[:2]}
    return Signature("assay", names, tuple(name for name in required if name not in first_two))


guard: Callable[[str], None] | None = None  # called before an object is imported; raises if that is not allowed
OBJECT = "python-"  # at the start of paths of objects of this program
_objects: dict[str, Any] = {}  # by path


def register(value: Any) -> str:
    """Return a path for an object of this program."""
    source = source_of(value)
    name = re.sub(r"\W+", "", getattr(value, "__name__", type(value).__name__)) or "object"
    path = f"{OBJECT}{hashlib.sha256(source.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}:{name}"
    _objects[path] = value
    return path


def registered(path: str) -> Any:
    """The object that was registered under this path; None if there is none."""
    return _objects.get(path)


def source_of(value: Any) -> str:
    """What identifies an object in another session: the source of its function or class, and simple values in it."""
    if isinstance(value, partial):
        inner = (*value.args, *value.keywords.items())
        return f"{source_of(value.func)}{list(map(_simple, inner))}"
    definition = inspect.unwrap(value) if inspect.isroutine(value) or isinstance(value, type) else type(value)
    code = getattr(definition, "__code__", None)
    try:
        if getattr(definition, "__name__", "") == "<lambda>":  # its source is the statement around it
            raise OSError
        text = inspect.getsource(definition)
    except (OSError, TypeError):  # typed into an interpreter, or not written in Python
        text = _compiled(code) if code else f"{definition.__module__}.{definition.__qualname__}"
    cells = inspect.getclosurevars(value).nonlocals if inspect.isfunction(value) else {}
    fields = {} if inspect.isroutine(value) or isinstance(value, type) else getattr(value, "__dict__", {})
    return f"{text}{[(name, _simple(inner)) for name, inner in sorted({**cells, **fields}.items())]}"


def _compiled(code: CodeType) -> str:
    constants = [_compiled(value) if inspect.iscode(value) else repr(value) for value in code.co_consts]
    return f"{code.co_code!r}{code.co_names}{code.co_varnames}{constants}"


def _simple(value: Any) -> Any:
    """The value, if its representation is the same in every session; else its type."""
    if isinstance(value, tuple | list):
        return [_simple(inner) for inner in value]
    return value if isinstance(value, str | int | float | bool | None) else type(value).__name__


def load_object(path: str) -> Any:
    """Import the object at "package.module:name" or "file.py:name", or return a registered one."""
    if path in _objects:
        return _objects[path]
    module, name = split_path(path)
    if module.startswith(OBJECT):
        raise UserError(
            f"{name} ({path}) is an object of the Python program that started the run: pass it again, unchanged, to "
            "assay.train(resume=...) or assay.evaluate(...), or name a function in a file instead"
        )
    if guard is not None:
        guard(path)
    loaded: Any = _load_file(Path(module)) if module.endswith(".py") else _load_module(module)
    for part in name.split("."):
        if not hasattr(loaded, part):
            raise UserError(f"'{module}' has no '{part}': check the name after ':' in '{path}'")
        loaded = getattr(loaded, part)
    return loaded


def split_path(path: str) -> tuple[str, str]:
    """Split into module or file, and name."""
    module, colon, name = path.rpartition(":")
    if not colon or not module or not name:
        raise UserError(f"'{path}' does not name an object: write package.module:name or file.py:name")
    return module, name


def normalized(path: str) -> str:
    """Return one form for all spellings of a file's path; text that names no object is returned unchanged."""
    module, colon, name = path.rpartition(":")
    try:
        return f"{Path(module).resolve()}:{name}" if colon and module.endswith(".py") else path
    except (OSError, ValueError, RuntimeError):  # not a path: a null byte, a loop of links
        return path


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            advice = "check the name, or give the file as path/to/file.py:name"
            raise UserError(f"there is no module '{name}': {advice}") from None
        raise UserError(f"importing '{name}' failed: it needs the module '{missing}', which is not installed") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"'{name}' is not the name of a module: {error}") from None
    except Exception as error:
        raise UserError(f"importing '{name}' failed: {type(error).__name__}: {error}") from error


def _load_file(file: Path) -> ModuleType:
    try:
        file = file.expanduser().resolve()
        is_file = file.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # a null byte, a loop of links, a name that is too long
        raise UserError(f"'{str(file)[:200]}' is not the path of a file ({error})") from error
    if not is_file:
        raise UserError(f"there is no file '{file}': check the path before ':'")
    name = f"{file.stem}_{hashlib.sha256(str(file).encode(errors='surrogateescape')).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"'{file}' cannot be loaded as Python code")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # so that it can import other files of its folder
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look up their module by name
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UserError(f"running '{file}' failed: {type(error).__name__}: {error}") from error
    return module
