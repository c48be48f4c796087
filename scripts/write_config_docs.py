"""Write docs/config.md from the configuration's types; with --print, write to standard output."""

import sys
from pathlib import Path
from typing import Any, get_args, get_origin

from offload_trainer.config import TrainConfig
from offload_trainer.settings import FLAGS

HEAD = """# Configuration

Look up keys, their values and defaults. Write a key in a YAML file under its section, as `section.key=value` on the
command line, or by its flag. Unknown keys, wrong types and impossible combinations are refused, all in one message.
`scripts/write_config_docs.py` generates this page from `offload_trainer/config.py`.
"""


def allowed(annotation: Any) -> str:
    """Describe a type for readers of the table."""
    if annotation in (int, float, str, bool):
        return {int: "integer", float: "number", str: "text", bool: "true, false"}[annotation]
    if get_origin(annotation) is tuple:
        inner = [argument for argument in get_args(annotation) if argument is not Ellipsis]
        return f"list of {allowed(inner[0])}" if Ellipsis in get_args(annotation) else ", ".join(map(allowed, inner))
    if get_origin(annotation) is dict:
        return "mapping"
    if str(get_origin(annotation)) == "typing.Literal":
        return ", ".join(str(argument) for argument in get_args(annotation))
    if hasattr(annotation, "__metadata__"):
        return allowed(get_args(annotation)[0])
    return ", ".join(allowed(argument) for argument in get_args(annotation))


def page() -> str:
    flags = {flag.key: name for name, flag in FLAGS.items()}
    lines = [HEAD]
    for section, info in TrainConfig.model_fields.items():
        model: Any = info.annotation
        lines += [f"## {section}", "", str(model.__doc__), ""]
        lines += ["| key | flag | allowed | default | meaning |", "| --- | --- | --- | --- | --- |"]
        for name, field in model.model_fields.items():
            default = field.default
            shown = f"`{list(default) if isinstance(default, tuple) else default}`"
            flag = flags.get(f"{section}.{name}")
            meaning = " ".join(str(field.description).split())
            cells = [f"`{name}`", f"`{flag}`" if flag else "", allowed(field.annotation), shown, meaning]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    if "--print" in sys.argv:
        print(page(), end="")
    else:
        Path(__file__).resolve().parent.parent.joinpath("docs/config.md").write_text(page())
