"""Scripts for the completion of shells, written out of the grammar: a key press starts no Python."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kway.cli._grammar import Command, Flag

Values = Mapping[tuple[str, str], Sequence[str]]
# Characters of a help text that are shown beside a flag.
HELP_LENGTH = 76

_BASH = """\
# Completes kway in bash. Written by: kway completion bash
_kway() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}}
    local flags="" valued="" own="" words="" place=0 i
    local -a places=("")
    COMPREPLY=()
    # bash takes --flag=value for three words.
    if [[ $cur == "=" ]]; then cur=""; elif [[ $prev == "=" ]]; then prev=${{COMP_WORDS[COMP_CWORD-2]}}; fi
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W "{top}" -- "$cur"))
        return
    fi
    case $command in
{commands}
        *) return ;;
    esac
    if [[ -n $own ]]; then
        # What follows the script is the script's: files are offered there.
        for ((i = 2; i < COMP_CWORD; i++)); do
            if [[ " $valued " == *" ${{COMP_WORDS[i]}} "* ]]; then ((i++)); continue; fi
            [[ ${{COMP_WORDS[i]}} == -* || ${{COMP_WORDS[i]}} == "=" ]] || return
        done
    fi
    if [[ " $valued " == *" $prev "* ]]; then
        case $command:$prev in
{values}
            *) compopt +o default +o bashdefault 2>/dev/null; return ;;
        esac
    elif [[ $cur == -* ]]; then
        words=$flags
    else
        for ((i = 2; i < COMP_CWORD; i++)); do
            if [[ " $valued " == *" ${{COMP_WORDS[i]}} "* ]]; then
                [[ ${{COMP_WORDS[i+1]}} == "=" ]] && ((i++))
                ((i++))
            elif [[ ${{COMP_WORDS[i]}} != -* ]]; then
                ((place++))
            fi
        done
        # What is beyond the last place is offered as that is.
        ((place < ${{#places[@]}})) || place=$((${{#places[@]}} - 1))
        words=${{places[place]}}
    fi
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o bashdefault -o default -F _kway kway
"""

_ZSH = """\
#compdef kway
# Completes kway in zsh. Written by: kway completion zsh
_kway() {{
    local -a commands
    if (( CURRENT == 2 )); then
        commands=(
{commands}
        )
        _describe command commands
        _arguments '--help[show the help]' '--version[show the version]'
        return
    fi
    local command=$words[2]
    shift words
    (( CURRENT-- ))
    case $command in
{arguments}
    esac
}}
if [[ $funcstack[1] == _kway ]]; then _kway "$@"; else compdef _kway kway; fi
"""


def bash(commands: "Sequence[Command]", values: Values) -> str:
    """Write the script for bash. ``values``: the names that an argument may be, see ``kway.cli.completion.values``."""
    cases, valued = [], dict[str, list[str]]()
    for command in commands:
        names = {name: flag for flag in command.flags for name in flag.names}
        takes = [name for name, flag in names.items() if flag.value and not flag.optional]
        places = (
            " ".join(f'"{" ".join(_listed(values, command, place.dest))}"' for place in command.places)
            or '""'
        )
        own = " own=1;" if any(place.rest for place in command.places) else ""
        cases.append(f'        {command.name}) flags="{" ".join(names)}"; valued="{" ".join(takes)}";{own}')
        cases.append(f"            places=({places}) ;;")
        for name in takes:
            listed = " ".join(_listed(values, command, names[name].dest))
            act = "return" if names[name].path else f'words="{listed}"' if listed else ""
            if act:
                valued.setdefault(act, []).append(f"{command.name}:{name}")
    top = " ".join([*(command.name for command in commands), "--help", "--version"])
    acts = "\n".join(f"            {'|'.join(places)}) {act} ;;" for act, places in valued.items())
    return _BASH.format(top=top, commands="\n".join(cases), values=acts)


def zsh(commands: "Sequence[Command]", values: Values) -> str:
    """Write the script for zsh: see ``bash``."""
    listed = "\n".join(f"            {_quoted(f'{c.name}:{c.help}')}" for c in commands)
    cases = []
    for command in commands:
        specs = [*_zsh_flags(command, values), *_zsh_places(command, values)]
        joined = " \\\n                ".join(_quoted(spec) for spec in specs)
        cases.append(f"        {command.name})\n            _arguments \\\n                {joined} ;;")
    return _ZSH.format(commands=listed, arguments="\n".join(cases))


def _zsh_flags(command: "Command", values: Values) -> Iterator[str]:
    for flag in command.flags:
        text = _short(flag.help).replace("[", r"\[").replace("]", r"\]")
        listed = " ".join(_listed(values, command, flag.dest))
        action = "_files" if flag.path else f"({listed})" if listed else " "
        for name in flag.names:
            if not flag.value:
                yield f"{name}[{text}]"
            elif flag.optional:
                yield f"{name}=-[{text}]::{_message(flag)}:{action}"
            else:
                yield f"{name}{'=' * name.startswith('--')}[{text}]:{_message(flag)}:{action}"


def _zsh_places(command: "Command", values: Values) -> Iterator[str]:
    for number, place in enumerate(command.places, 1):
        which = "*" if place.many else str(number)
        if place.rest:
            yield f"*::{place.name}:_files"
        elif names := " ".join(_listed(values, command, place.dest)):
            yield f'{which}:{place.name}: _alternative "names:name:({names})" "files:file:_files"'
        else:
            yield f"{which}:{place.name}:_files"


def _message(flag: "Flag") -> str:
    return flag.value.replace(":", r"\:")


def fish(commands: "Sequence[Command]", values: Values) -> str:
    """Write the script for fish: see ``bash``."""
    lines = ["# Completes kway in fish. Written by: kway completion fish", "complete -c kway -f"]
    lines += [
        f"complete -c kway -n __fish_use_subcommand -a {command.name} -d {_escaped(command.help)}"
        for command in commands
    ]
    lines += [
        f"complete -c kway -n __fish_use_subcommand -l {name} -d {_escaped(text)}"
        for name, text in (("help", "show the help"), ("version", "show the version"))
    ]
    for command in commands:
        start = f"complete -c kway -n '__fish_seen_subcommand_from {command.name}'"
        for flag in command.flags:
            names = " ".join(f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in flag.names)
            kind = " -r -F" if flag.path else " -x" if flag.value and not flag.optional else ""
            words = " ".join(_listed(values, command, flag.dest)) if flag.value else ""
            listed = f" -a {_escaped(words)}" if words else ""
            lines.append(f"{start} {names}{kind}{listed} -d {_escaped(_short(flag.help))}")
        first = _listed(values, command, command.places[0].dest) if len(command.places) > 1 else ()
        for number, place in enumerate(command.places):
            words = " ".join(_listed(values, command, place.dest))
            listed = f" -a {_escaped(words)}" if words else ""
            # Where the first is one of some names, those say whether it is typed.
            typed = (
                f"{'' if number else 'not '}__fish_seen_subcommand_from {' '.join(first)}" if first else ""
            )
            lines.append(f"{start[:-1]}; and {typed}' -F{listed}" if typed else f"{start} -F{listed}")
    return "\n".join(lines) + "\n"


def _listed(values: Values, command: "Command", dest: str) -> Sequence[str]:
    """Return the names that an argument of a command may be; none where they cannot be listed."""
    return values.get((command.name, dest), values.get(("", dest), ()))


def _short(text: str) -> str:
    return text if len(text) <= HELP_LENGTH else text[:HELP_LENGTH].rsplit(" ", 1)[0] + " ..."


def _quoted(text: str) -> str:
    """Quote for bash and zsh, in single quotes."""
    return "'" + text.replace("'", "'\\''") + "'"


def _escaped(text: str) -> str:
    """Quote for fish, in single quotes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: Mapping[str, Callable[["Sequence[Command]", Values], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
