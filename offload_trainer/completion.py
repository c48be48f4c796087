"""Shell completion for bash and zsh: generate the script that `offload-train completion` prints.

The script completes commands, flags, configuration keys and enumerated values. It is static, generated from the tables
behind `--help` and the configuration's types, so that pressing Tab does not start Python. shtab and argcomplete need an
argparse parser, which cannot express `section.key=value`; argcomplete also starts Python on each Tab. zsh runs the bash
script through bashcompinit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from offload_trainer.errors import UserError
from offload_trainer.help_text import command_names, switches_of, takes_keys
from offload_trainer.model.presets import PRESETS
from offload_trainer.plan.machine import named_machines
from offload_trainer.run.commands.recipes import recipes
from offload_trainer.settings import FLAGS, all_keys, annotation_of, literals_of
from offload_trainer.units import shown

SHELLS = ("bash", "zsh")

# Values beyond what the types list: fixed words per key, and the keys and flags whose value is a file or a directory.
_WORDS = {
    "model.name": tuple(PRESETS),
    "data.path": ("builtin",),
    "data.tokenizer": ("auto", "builtin"),
    "save.resume": ("auto", "never"),
}
_FILES = {"data.path", "data.validation_path", "data.chat_template", "--write", "--machine"}
_DIRECTORIES = {"model.name", "data.tokenizer", "data.cache", "placement.nvme", "save.output", "save.resume"}

_SCRIPT = r"""# Completion of offload-train, for ~/.{shell}rc:  source <(offload-train completion {shell})
{before}_offload_train() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} last=${{COMP_WORDS[COMP_CWORD-1]}}
    local key="" given="" command=train words="" keys=""
    case " {commands} " in
        *" ${{COMP_WORDS[1]}} "*) [ "$COMP_CWORD" -gt 1 ] && command=${{COMP_WORDS[1]}} ;;
    esac
    # bash takes NAME=VALUE apart, zsh does not.
    if [ "$cur" = "=" ]; then
        key=$last cur=""
    elif [ "$last" = "=" ]; then
        key=${{COMP_WORDS[COMP_CWORD-2]}}
    elif [ "${{cur#*=}}" != "$cur" ]; then
        key=${{cur%%=*}} given=${{cur%%=*}}= cur=${{cur#*=}}
    elif [ "${{last#--}}" != "$last" ]; then
        key=$last
    fi
    COMPREPLY=()
    case $key in
        "" | {switches}) ;;
{values}
        *) return ;;
    esac
    case $command in
{arguments}
    esac
    [ "$COMP_CWORD" -eq 1 ] && keys="$keys {commands}"
    case $cur in
        -*) COMPREPLY=($(compgen -W "$words" -- "$cur")) ;;
        *) COMPREPLY=($(compgen -W "$keys" -- "$cur") $(compgen -f -- "$cur")) ;;
    esac
    case ${{COMPREPLY[*]}} in
        *= | *overrides.) compopt -o nospace 2> /dev/null ;;  # zsh has none
    esac
}}
complete -o filenames -F _offload_train offload-train
"""


def script(words: list[str]) -> str:
    """Return the completion script for the shell that `words` names. Raises UserError unless it is bash or zsh."""
    if len(words) != 1 or words[0] not in SHELLS:
        given = ", ".join(map(shown, words)) or "nothing"
        raise UserError(f"completion needs the shell's name, {' or '.join(SHELLS)}; got {given}")
    shell = words[0]
    return _SCRIPT.format(
        shell=shell,
        before="autoload -U +X compinit bashcompinit && compinit && bashcompinit\n" if shell == "zsh" else "",
        commands=" ".join(command_names()),
        switches=" | ".join(dict.fromkeys(_without_values())),
        values="\n".join(_values()),
        arguments="\n".join(_arguments()),
    )


def _without_values() -> Iterator[str]:
    yield from (name for name, flag in FLAGS.items() if not flag.metavar)
    yield from (name for command in command_names() for name, takes in switches_of(command).items() if not takes)
    yield from ("--help", "--version")


def _values() -> Iterator[str]:
    """Yield a shell `case` branch for each flag and key whose values are known."""
    spelled: dict[str, list[str]] = {key: [key] for key in all_keys()}
    for name, flag in FLAGS.items():
        spelled[flag.key] += [name] if flag.metavar else []
    del spelled["model.overrides"]  # its keys depend on the model
    for key, names in spelled.items():
        words = _WORDS.get(key) or tuple(dict.fromkeys(literals_of(annotation_of(*key.split(".", 1)))))
        yield from _case(names, words, files=key in _FILES, directories=key in _DIRECTORIES)
    yield from _case(["--machine"], named_machines(), files=True)
    yield from _case(["--write"], (), files=True)
    yield from _case(["--include-path"], (), directories=True)


def _case(names: list[str], words: Any, *, files: bool = False, directories: bool = False) -> Iterator[str]:
    found = [f'$(compgen -P "$given" -W "{" ".join(words)}" -- "$cur")'] if words else []
    found += [f'$(compgen -P "$given" {"-f" if files else "-d"} -- "$cur")'] if files or directories else []
    if found:
        yield f"        {' | '.join(names)}) COMPREPLY=({' '.join(found)}); return ;;"


def _arguments() -> Iterator[str]:
    """Yield a shell `case` branch for each command: its flags and the other words that may follow it."""
    flags = list(FLAGS)
    keys = [f"{key}." if key == "model.overrides" else f"{key}=" for key in all_keys()]
    others = {"cp": [recipe.name for recipe in recipes()], "completion": list(SHELLS)}
    for command in command_names():
        words = [*switches_of(command), *(flags if takes_keys(command) else ()), "--help"]
        follow = keys if takes_keys(command) else others.get(command, ())
        yield f'        {command}) words="{" ".join(words)}" keys="{" ".join(follow)}" ;;'
