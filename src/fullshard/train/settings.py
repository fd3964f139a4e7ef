"""Configuration from one TOML or YAML file and `--section.key value` overrides, with an origin for every value.

Precedence: default < file < command line. A key or value that is not understood is an error with a suggestion;
nothing is ever ignored in silence.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from fullshard.train.config import Config
from fullshard.train.errors import ConfigError

CONFIG_SUFFIXES = (".toml", ".yaml", ".yml")


@dataclass(frozen=True)
class Settings:
    """A configuration and where each value came from ("default", the file's name, or "command line")."""

    config: Config
    origins: Mapping[str, str]  # "section.key" -> origin


def load_settings(path: Path | None, overrides: Sequence[tuple[str, str]] = ()) -> Settings:
    """Merge the defaults, the file at `path` and the overrides (`("section.key", text)`), in this order."""
    hints = key_types()
    values: dict[str, Any] = {}
    origins = dict.fromkeys(hints, "default")
    if path is not None:
        for key, value in _flatten(read_file(path), path.name).items():
            values[key] = _checked(key, value, hints[_known(key, hints, path.name)], path.name)
            origins[key] = path.name
    for key, text in overrides:
        hint = hints[_known(key, hints, "the command line")]
        values[key] = _checked(key, _from_text(key, text, hint), hint, "the command line")
        origins[key] = "command line"
    return Settings(_build(values), origins)


def key_types() -> dict[str, Any]:
    """Every "section.key" with the type of its value."""
    sections = get_type_hints(Config)
    return {
        f"{section}.{key}": hint
        for section, section_type in sections.items()
        for key, hint in get_type_hints(section_type).items()
    }


def read_file(path: Path) -> dict[str, Any]:
    """The tables of a TOML or YAML file, as they stand there."""
    if path.suffix not in CONFIG_SUFFIXES:
        raise ConfigError(f"the configuration {path} must end in {', '.join(CONFIG_SUFFIXES)}.")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}.{_similar_file(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration {path} cannot be read: {error}") from None
    try:
        tables = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"the configuration {path} is not valid {path.suffix[1:].upper()}: {error}") from None
    if tables is None:
        return {}
    if not isinstance(tables, dict):
        raise ConfigError(f"the configuration {path} must hold sections such as [model] and [train], not a plain list.")
    return tables


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Take `--section.key value`, `--section.key=value` and `section.key=value` out of a command line."""
    known_sections = {field.name for field in fields(Config)}
    rest: list[str] = []
    overrides: list[tuple[str, str]] = []
    pending = iter(arguments)
    for argument in pending:
        name, equals, text = argument.removeprefix("--").partition("=")
        dashed = argument.startswith("--")
        dotted = "." in name and not name.endswith(CONFIG_SUFFIXES)
        if not (dotted and (dashed or (equals and name.partition(".")[0] in known_sections))):
            rest.append(argument)
            continue
        key = name.replace("-", "_")
        if not equals:
            value = next(pending, None)
            if value is None:
                raise ConfigError(f"{argument} needs a value: {argument} VALUE.")
            text = value
        overrides.append((key, text))
    return rest, overrides


def to_toml(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """The configuration as a TOML file that `load_settings` reads back to an equal one."""
    lines: list[str] = []
    for section in fields(config):
        lines += ["", f"[{section.name}]"] if lines else [f"[{section.name}]"]
        table = getattr(config, section.name)
        for entry in fields(table):
            line = f"{entry.name} = {_toml_value(getattr(table, entry.name))}"
            origin = (origins or {}).get(f"{section.name}.{entry.name}")
            lines.append(f"{line}  # {origin}" if origin else line)
    return "\n".join(lines) + "\n"


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """The configuration as plain tables for JSON."""
    return {
        section.name: {
            entry.name: _plain(getattr(getattr(config, section.name), entry.name))
            for entry in fields(getattr(config, section.name))
        }
        for section in fields(config)
    }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, str):
        # A JSON string is a TOML string, except that TOML also wants DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _build(values: Mapping[str, Any]) -> Config:
    sections: dict[str, Any] = {}
    for name, section_type in get_type_hints(Config).items():
        own = {key.partition(".")[2]: value for key, value in values.items() if key.partition(".")[0] == name}
        sections[name] = section_type(**own)
    return Config(**sections)


def _flatten(tables: Mapping[str, Any], where: str) -> dict[str, Any]:
    sections = [field.name for field in fields(Config)]
    flat: dict[str, Any] = {}
    for section, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{where}: the key {section!r} stands outside a section.{_suggest(str(section))}")
        if section not in sections:
            near = difflib.get_close_matches(str(section), sections, n=1)
            hint = f" Did you mean [{near[0]}]?" if near else f" Sections: {', '.join(sections)}."
            raise ConfigError(f"{where}: there is no section [{section}].{hint}")
        flat |= {f"{section}.{key}": value for key, value in table.items()}
    return flat


def _known(key: str, hints: Mapping[str, Any], where: str) -> str:
    if key not in hints:
        raise ConfigError(f"{where}: there is no setting {key!r}.{_suggest(key)}")
    return key


def _suggest(key: str) -> str:
    """' Did you mean ...?' for a wrong key: a near spelling, or the same name in another section."""
    known = list(key_types())
    leaf = key.rpartition(".")[2]
    elsewhere = [name for name in known if name.partition(".")[2] == leaf]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    near = near or difflib.get_close_matches(leaf, [name.partition(".")[2] for name in known], n=1, cutoff=0.7)
    if elsewhere:
        return f" Did you mean {elsewhere[0]}?"
    if near:
        full = near[0] if "." in near[0] else next(name for name in known if name.endswith("." + near[0]))
        return f" Did you mean {full}?"
    section = key.partition(".")[0]
    siblings = [name for name in known if name.startswith(section + ".")]
    return (
        f" Settings of [{section}]: {', '.join(siblings)}." if siblings else " `fullshard config show` lists them all."
    )


def _similar_file(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f" There is no folder {folder} either."
    names = [entry.name for entry in folder.iterdir() if entry.suffix in CONFIG_SUFFIXES]
    near = difflib.get_close_matches(path.name, names, n=1)
    return f" Did you mean {folder / near[0]}?" if near else ""


def _from_text(key: str, text: str, hint: Any) -> Any:
    """The value a command-line text stands for; types are checked afterwards."""
    if hint is bool:
        words = {"true": True, "false": False}
        if text.lower() not in words:
            raise ConfigError(f"{key} = {text!r} on the command line: expected true or false.")
        return words[text.lower()]
    if hint is int:
        try:
            return int(text.replace("_", ""))
        except ValueError:
            raise ConfigError(f"{key} = {text!r} on the command line: expected a whole number.") from None
    if get_origin(hint) is tuple:
        return _list_from_text(key, text)
    return text


def _list_from_text(key: str, text: str) -> Any:
    if not text.startswith("["):
        return text.split(",")
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise ConfigError(f'{key} = {text!r} on the command line: expected a,b,c or ["a", "b"].') from None


def _checked(key: str, value: Any, hint: Any, where: str) -> Any:
    """`value` as the type of the setting, or an error that names both."""
    if get_origin(hint) is Literal:
        return _checked_choice(key, value, get_args(hint), where)
    if get_origin(hint) is tuple:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise ConfigError(f"{where}: {key} = {value!r}: expected a list of strings.")
        return tuple(items)
    if hint is float:
        return _checked_float(key, value, where)
    if type(value) is not hint:
        names = {int: "a whole number", bool: "true or false", str: "a string"}
        raise ConfigError(f"{where}: {key} = {value!r}: expected {names[hint]}, found {type(value).__name__}.")
    return value


def _checked_choice(key: str, value: Any, choices: tuple[str, ...], where: str) -> str:
    # YAML reads a bare no / yes as a boolean; the words are meant.
    word = {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
    if word in choices:
        return str(word)
    near = difflib.get_close_matches(str(word), choices, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{where}: {key} = {value!r}: expected one of {', '.join(choices)}.{hint}")


def _checked_float(key: str, value: Any, where: str) -> float:
    # YAML 1.1 reads 1e-3 (no dot) as a string, and the command line only has strings.
    number: float | None = None
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            number = float(value)
        except ValueError:
            number = None
    if number is None or not math.isfinite(number):
        raise ConfigError(f"{where}: {key} = {value!r}: expected a finite number.")
    return number
