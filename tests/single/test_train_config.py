"""Configuration: precedence, types, suggestions, and the written file reads back equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from fullshard.train.config import Config, DataConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from fullshard.train.errors import ConfigError
from fullshard.train.settings import load_settings, split_overrides, to_toml

EXAMPLES = Path(__file__).parents[2] / "examples"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_command_line_wins_over_file_wins_over_default(tmp_path: Path) -> None:
    path = write(tmp_path, "a.toml", "[train]\nsteps = 7\nseed = 3\n[optim]\nlr = 1\n")
    settings = load_settings(path, [("train.steps", "9"), ("train.steps", "11")])
    assert (settings.config.train.steps, settings.config.train.seed, settings.config.optim.lr) == (11, 3, 1.0)
    assert settings.config.train.micro_batch_size == TrainConfig().micro_batch_size
    assert settings.origins["train.steps"] == "command line"
    assert settings.origins["train.seed"] == "a.toml"
    assert settings.origins["train.micro_batch_size"] == "default"


def test_toml_and_yaml_say_the_same(tmp_path: Path) -> None:
    toml = write(tmp_path, "a.toml", '[optim]\nlr = 1e-3\n[data]\npaths = ["x", "y"]\n[checkpoint]\nresume = "no"\n')
    # 1e-3 is a string and a bare no is a boolean in YAML 1.1: both must still mean what they say.
    yaml = write(tmp_path, "a.yaml", "optim:\n  lr: 1e-3\ndata:\n  paths: [x, y]\ncheckpoint:\n  resume: no\n")
    assert load_settings(toml).config == load_settings(yaml).config


def test_written_configuration_reads_back_equal(tmp_path: Path) -> None:
    config = Config(
        data=DataConfig(paths=('we"ird\\näme\x7f😀', "b,c"), validation_fraction=1e-05),
        run=RunConfig(sample_prompt="a\nb\t"),
        model=ModelConfig(tie_word_embeddings=True),
    )
    assert load_settings(write(tmp_path, "c.toml", to_toml(config))).config == config


def test_lists_on_the_command_line() -> None:
    assert load_settings(None, [("data.paths", "a,b")]).config.data.paths == ("a", "b")
    assert load_settings(None, [("data.paths", '["a,b"]')]).config.data.paths == ("a,b",)


@pytest.mark.parametrize(
    ("arguments", "rest", "overrides"),
    [
        (["c.toml", "--optim.lr", "1e-3"], ["c.toml"], [("optim.lr", "1e-3")]),
        (["--optim.lr=1e-3", "c.toml", "--json"], ["c.toml", "--json"], [("optim.lr", "1e-3")]),
        (["optim.lr=2", "runs/a.b/c.toml"], ["runs/a.b/c.toml"], [("optim.lr", "2")]),
        (["--data.max-bytes", "-1"], [], [("data.max_bytes", "-1")]),
        (["--run.name", "c.toml"], [], [("run.name", "c.toml")]),
    ],
)
def test_overrides_are_taken_out_of_the_command_line(
    arguments: list[str], rest: list[str], overrides: list[tuple[str, str]]
) -> None:
    assert split_overrides(arguments) == (rest, overrides)


def test_override_without_a_value_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"--optim\.lr needs a value"):
        split_overrides(["--optim.lr"])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("optim.lrr", "1", r"no setting 'optim\.lrr'.*Did you mean optim\.lr\?"),
        ("optm.lr", "1", r"Did you mean optim\.lr\?"),
        ("train.lr", "1", r"Did you mean optim\.lr\?"),
        ("steps", "1", r"Did you mean train\.steps\?"),
        ("train.micro_batchsize", "1", r"Did you mean train\.micro_batch_size\?"),
        ("train.zzzzzz", "1", r"Settings of \[train\]: train\.steps"),
        ("train.steps", "many", r"expected a whole number"),
        ("train.steps", "0", r"train\.steps = 0 is not possible: expected at least 1"),
        ("train.precision", "fp23", r"expected one of fp32, bf16.*Did you mean 'fp32'\?"),
        ("model.tie_word_embeddings", "perhaps", "expected true or false"),
        ("optim.lr", "nan", "expected a finite number"),
        ("optim.lr", "-1", "expected a positive number"),
        ("model.num_key_value_heads", "3", r"expected a divisor of model\.num_attention_heads = 8"),
        ("data.seq_len", "4096", r"at most model\.max_position_embeddings = 2048"),
        ("run.name", "a/b", "one folder name without slashes"),
        ("data.paths", "[1]", "expected a list of strings"),
        ("train.global_batch_size", "-1", r"expected 0 \(what train\.gradient_accumulation makes it\) or a number"),
        ("profile.steps", "3", r"profile\.steps = 3 is not possible: expected at least 4 \(one that counts copies"),
    ],
)
def test_wrong_setting_is_an_error_that_helps(key: str, value: str, message: str) -> None:
    """B98: neither a key nor a value that does not exist is passed over."""
    with pytest.raises(ConfigError, match=message):
        load_settings(None, [(key, value)])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "[train]\nsteps = '5'\n", r"a\.toml: train\.steps = '5': expected a whole number, found str"),
        ("a.toml", "[train]\nsteps = true\n", "expected a whole number, found bool"),
        ("a.toml", "[trian]\nsteps = 5\n", r"no section \[trian\]\. Did you mean \[train\]\?"),
        ("a.toml", "steps = 5\n", r"'steps' stands outside a section\. Did you mean train\.steps\?"),
        ("a.toml", "[train\n", "not valid TOML"),
        ("a.yaml", "train: [", "not valid YAML"),
        ("a.yaml", "- 1\n", "must hold sections"),
        ("a.json", "{}", r"must end in \.toml, \.yaml, \.yml"),
    ],
)
def test_wrong_file_is_an_error_that_helps(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(write(tmp_path, name, text))


def test_two_settings_for_the_windows_of_a_step_are_an_error() -> None:
    assert TrainConfig(micro_batch_size=2, gradient_accumulation=3).step_windows(ranks=4) == 24
    assert TrainConfig(global_batch_size=10).step_windows(ranks=4) == 10
    with pytest.raises(ConfigError, match=r"gradient_accumulation = 2 is .* where train\.global_batch_size = 8 says"):
        TrainConfig(global_batch_size=8, gradient_accumulation=2)


def test_missing_file_suggests_a_near_name(tmp_path: Path) -> None:
    write(tmp_path, "demo.toml", "")
    with pytest.raises(ConfigError, match=r"Did you mean .*demo\.toml\?"):
        load_settings(tmp_path / "dmo.toml")


def test_mesh_must_fit_the_number_of_ranks() -> None:
    assert ParallelConfig().mesh_shape(4) == (1, 4)
    assert ParallelConfig(dp_replicate=2).mesh_shape(4) == (2, 2)
    for wrong in (ParallelConfig(dp_replicate=3), ParallelConfig(dp_shard=3), ParallelConfig(dp_replicate=8)):
        with pytest.raises(ConfigError, match="but 4 are started"):
            wrong.mesh_shape(4)


@pytest.mark.parametrize(
    "path", [*sorted(EXAMPLES.glob("*.toml")), *sorted(EXAMPLES.glob("*.yaml"))], ids=lambda path: path.name
)
def test_example_is_valid(path: Path) -> None:
    config = load_settings(path).config
    config.parallel.mesh_shape(config.parallel.nproc)
