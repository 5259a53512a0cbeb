"""Extract from SGLang's source what its servers accept, for the stand-in server of the tests.

    python dev/sglang_requests.py SITE_PACKAGES > tests/helpers/sglang_requests.json

SITE_PACKAGES contains the package sglang, which is not imported. The result has, for each endpoint, the fields of its
request class with their types; besides, the sampling parameters, the modules that serialized tensors may name, and the
arguments of the server.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

Fields = dict[str, dict[str, Any]]
WORDS = ("generat", "weights_", "memory_occupation", "abort", "flush_cache", "model_info", "server_info", "health")


def classes(file: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)}


def plain_type(node: ast.expr) -> str:
    """The type without the metadata of `Annotated`; bytes in base64 are strings in JSON."""
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("Annotated", "A"):
        assert isinstance(node.slice, ast.Tuple)
        inner = ast.unparse(node.slice.elts[0])
        return inner.replace("bytes", "str") if "Base64Bytes" in ast.unparse(node) else inner
    return ast.unparse(node)


def fields(name: str, known: dict[str, ast.ClassDef]) -> Fields:
    found: Fields = {}
    for base in known[name].bases:
        if isinstance(base, ast.Name) and base.id in known:
            found |= fields(base.id, known)
    for node in known[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = {"type": plain_type(node.annotation), "required": node.value is None}
    return found


def endpoints(file: Path, known: dict[str, ast.ClassDef]) -> dict[str, dict[str, Any]]:
    """Methods and fields by path; the fields are None for endpoints whose request has no class."""
    found = {}
    for node in ast.parse(file.read_text()).body:
        if not isinstance(node, ast.AsyncFunctionDef):
            continue
        routes = [one for one in node.decorator_list if isinstance(one, ast.Call)]
        routes = [one for one in routes if ast.unparse(one.func) in ("app.get", "app.post", "app.put", "app.api_route")]
        requests = [plain_type(one.annotation) for one in node.args.args if one.arg == "obj" and one.annotation]
        query = [one.arg for one in node.args.args if one.annotation and ast.unparse(one.annotation) == "float"]
        for route in routes:
            if not isinstance(route.args[0], ast.Constant):
                continue
            methods = [ast.unparse(route.func).removeprefix("app.").upper()]
            for word in route.keywords:
                if word.arg == "methods":
                    methods = ast.literal_eval(word.value)
            name = requests[0].removeprefix("Optional[").removesuffix("]") if requests else None
            own = fields(name, known) if name in known else None
            found[route.args[0].value] = {"methods": methods, "request": name, "query": query, "fields": own}
    return found


def main() -> None:
    srt = Path(sys.argv[1]) / "sglang" / "srt"
    known = classes(srt / "managers" / "io_struct.py")
    served = endpoints(srt / "entrypoints" / "http_server.py", known)
    sampling = classes(srt / "sampling" / "sampling_params.py")
    unpickler = classes(srt / "utils" / "common.py")["SafeUnpickler"]
    constants = {ast.unparse(node.targets[0]): node.value for node in unpickler.body if isinstance(node, ast.Assign)}
    arguments = classes(srt / "server_args.py")["ServerArgs"].body
    names = [n.target.id for n in arguments if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
    version = next(Path(sys.argv[1]).glob("sglang-*.dist-info")).name.removeprefix("sglang-").removesuffix(".dist-info")
    content = {
        "version": version,
        "endpoints": {path: served[path] for path in sorted(served) if any(word in path for word in WORDS)},
        "sampling_params": fields("SamplingParams", sampling),
        "modules_of_tensors": sorted(ast.literal_eval(constants["ALLOWED_MODULE_PREFIXES"])),
        "server_arguments": sorted(names),
    }
    text = json.dumps(content, indent=1)
    for start, end in (("{", "}"), ("[", "]")):  # innermost ones in one line
        text = re.sub(rf"\{start}[^{{}}\[\]]*\{end}", lambda match: " ".join(match[0].split()), text)
    print(text)


if __name__ == "__main__":
    main()
