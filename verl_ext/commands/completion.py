"""The command `verl-ext completion`: a script by which a shell completes commands, keys and choices.

The script holds the words themselves, so that a completion starts no Python. It is made from the table of keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from verl_ext.commands.command_line import command
from verl_ext.config import key_table
from verl_ext.options import REQUIRED, Options, option

_WITH_TRAINER = ("train", "plan", "launch")


@dataclass(frozen=True)
class CompletionOptions(Options):
    """Print a script by which a shell completes the words of verl-ext.

    bash: source <(verl-ext completion bash)
    zsh:  source <(verl-ext completion zsh)
    fish: verl-ext completion fish | source
    Put the line into the shell's start file to have it in every shell. Print it again after an update.
    """

    shell: str = option(REQUIRED, "the shell; also as the first word", choices=("bash", "zsh", "fish"), required=True)


def completion(options: CompletionOptions) -> str:
    """Return the script."""
    case, names = _CASES[options.shell], key_table.command_names()
    cases = "\n".join(case.format(name=name, words=" ".join(_words(name))) for name in names)
    return _SCRIPTS[options.shell].replace("COMMANDS", " ".join(names)).replace("CASES", cases)


def _words(name: str) -> Iterator[str]:
    """Yield what may follow a command: subcommands, `key=` and `key=choice`."""
    names = [name, *(other for other in key_table.commands() if other.startswith(f"{name} "))]
    names += ["train"] * (name in _WITH_TRAINER) + ["tokenize"] * (name == "train")
    yield from (other.partition(" ")[2] for other in names if " " in other)
    rows = dict.fromkeys((row.key, row.values) for other in names for row in key_table.keys_of(other))
    yield from dict.fromkeys(f"{key}=" for key, _ in rows)
    for key, values in rows:
        choices = key_table.choices(key) if key == "recipe" and name in _WITH_TRAINER else values.split(" | ")
        yield from (f"{key}={choice}" for choice in choices if len(choices) > 1)
    yield "--help"


# COMMANDS stands for the names of commands, CASES for a line a command with its words.
_SCRIPTS = {
    # bash cuts words at `=`, so the line itself is read.
    "bash": """\
_verl_ext() {
  local line=${COMP_LINE:0:COMP_POINT} known=
  local word=${line##* }
  if [[ $COMP_CWORD == 1 ]]; then
    known="COMMANDS --version"
  else
    case ${COMP_WORDS[1]} in
CASES
    esac
    if [[ $word == *=* ]]; then
      known=$(tr ' ' '\\n' <<<"$known" | grep "^${word%%=*}=." | cut -d= -f2-)
      word=${word#*=}
    else
      known=$(tr ' ' '\\n' <<<"$known" | grep -v '=.')
    fi
  fi
  COMPREPLY=($(compgen -W "$known" -- "$word"))
  if [[ ${#COMPREPLY[@]} == 0 || ($COMP_CWORD == 2 && -n $word) ]]; then
    compopt -o filenames
    COMPREPLY+=($(compgen -f -- "$word"))
  fi
  [[ ${COMPREPLY[0]} != *= ]] || compopt -o nospace
}
complete -F _verl_ext verl-ext""",
    "zsh": """\
#compdef verl-ext
_verl_ext() {
  local -a known
  local word=${words[CURRENT]}
  if (( CURRENT == 2 )); then
    compadd -- COMMANDS --version
    return
  fi
  case ${words[2]} in
CASES
  esac
  if [[ $word == *=* ]]; then
    known=(${(M)known:#${word%%=*}=?*})
    compset -P '*='
    if (( $#known )); then compadd -- ${known#*=}; else _files; fi
  else
    compadd -S '' -- ${known:#*=?*}
    _files
  fi
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _verl_ext verl-ext""",
    "fish": """\
complete -c verl-ext -f -n __fish_use_subcommand -a 'COMMANDS --version'
CASES""",
}
_CASES = {
    "bash": "      {name}) known='{words}' ;;",
    "zsh": "    {name}) known=({words}) ;;",
    "fish": "complete -c verl-ext -n '__fish_seen_subcommand_from {name}' -a '{words}'",
}

main = command("completion", CompletionOptions, completion, example="bash|zsh|fish", first="shell")
