"""`assay report`: a run as one HTML file that needs no server, no network and no other file.

Everything except curves and tokens is HTML, with all text escaped (`report_html`). The script gets its data from a
JSON block, in which no character can end the block, and puts text into the page as text only. The content security
policy allows this script and this style alone.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from assay.runs.curves import X_LABELS
from assay.types import describe_error, hide_credentials
from assay.web.data import RunView, plain
from assay.web.report_html import ReportContent, accuracy_intervals, page
from assay.web.samples import ReportLimits, paired_facts, select_samples

STATIC = Path(__file__).parent / "static"
MODULES = ("dom", "charts", "tokens", "report")  # in the order of their imports
MAX_BYTES = 3_000_000
LEVELS = (  # tried in this order, until the file is small enough
    ReportLimits(),
    ReportLimits(samples=4, text=2000, token_views=6, tokens=400, points=300),
    ReportLimits(samples=3, text=600, token_views=3, tokens=200, points=150),
    ReportLimits(samples=0, text=300, token_views=0, tokens=0, points=60),
)
IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";\n', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class) (\w+))", re.MULTILINE)


def write_report(run_path: Path) -> tuple[str, bool]:
    """The report of a run as HTML, and whether samples were left out or shortened to keep it small."""
    view = RunView(run_path.resolve().name, run_path)
    content = read_content(view)
    for number, limits in enumerate(LEVELS):
        text = render(view, content, limits, shortened=number > 0)
        if len(text.encode()) < MAX_BYTES:
            return text, number > 0
    raise AssertionError("a report without samples is small, because all of its texts are limited")


def read_content(view: RunView) -> ReportContent:
    detail = view.detail(findings_wait_s=None)
    problems = list(detail["problems"])
    paired = None
    try:
        paired = paired_facts(view)
    except Exception as error:
        problems.append(f"the evaluations cannot be compared ({describe_error(error)})")
    try:
        toml = hide_credentials(view.folder.read("config.toml").decode(errors="replace"))
    except OSError:
        toml = ""
    return ReportContent(detail, detail["findings"], paired, list(dict.fromkeys(problems)), toml)


def render(view: RunView, content: ReportContent, limits: ReportLimits, shortened: bool) -> str:
    samples, problems = select_samples(view, limits) if limits.samples else ([], [])
    content = replace(content, problems=[*content.problems, *problems])
    data = {
        "metrics": {x: rounded(view.metrics(x=x, points=limits.points)) for x in X_LABELS},
        "tokens": [one["tokens"] for kind in samples for one in kind.rollouts if one["tokens"]],
        "intervals": accuracy_intervals(content.detail),
    }
    script = bundle()
    style = (STATIC / "style.css").read_text("utf-8") + (STATIC / "report.css").read_text("utf-8")
    policy = (
        f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return page(content, samples, shortened, policy=policy, style=style, data=json_block(data), script=script)


# Scripts and data


def bundle() -> str:
    """The modules as one script. Each has its own scope, because names are only unique within a module."""
    parts = ['"use strict";']
    for name in MODULES:
        text = (STATIC / f"{name}.js").read_text("utf-8")
        text = IMPORT.sub(lambda match: f"const {{{match[1].replace(' as ', ': ')}}} = {match[2]};\n", text)
        exported = EXPORT.findall(text)
        text = EXPORT.sub("", text)
        assert not re.search(r"^(?:import|export)\b", text, re.MULTILINE), (
            f"{name}.js: an import or export of this kind"
        )
        parts.append(f"const {name} = (() => {{\n{text}\nreturn {{ {', '.join(exported)} }};\n}})();")
    return "\n".join(parts).replace("</script", "<\\/script").replace("<!--", "<\\!--")


def digest(text: str) -> str:
    """The source of an inline script or style for the content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def json_block(data: Any) -> str:
    """JSON that stays inside of its element whatever texts it contains."""
    text = json.dumps(plain(data), allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def rounded(value: Any) -> Any:
    """Numbers with six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value
