"""Config mistakes: each is refused with the field named; the shipped configs are valid."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from pdd.config import LaunchConfig, load

CONFIGS = Path(__file__).parents[3] / "configs"
Raw = dict[str, object]


def raw_local() -> Raw:
    return yaml.safe_load((CONFIGS / "local.yaml").read_text())


def set_in(*path_and_value: object) -> Callable[[Raw], None]:
    *path, last, value = path_and_value

    def change(raw: Raw) -> None:
        at: object = raw
        for key in path:
            at = at[key]  # type: ignore[index]
        at[last] = value  # type: ignore[index]

    return change


def set_second_tier_alone(raw: Raw) -> None:
    set_in("workers", 0, "prefix_cache", False)(raw)
    set_in("workers", 0, "host_cache_mib", 4)(raw)


MISTAKES = {
    "unknown field": (set_in("policy", "pipelines", "auto"), "policy.pipelines"),
    "unknown engine": (set_in("workers", 0, "engine", "onnx"), "workers.0.engine"),
    "page size 0": (set_in("workers", 1, "page_size", 0), "workers.1.page_size"),
    "pool smaller than one request": (set_in("workers", 2, "num_pages", 2), "max_context_tokens=4096"),
    "same name twice": (set_in("workers", 1, "name", "prefill-0"), "prefill-0"),
    "unknown site": (set_in("workers", 0, "site", "mars"), "workers.prefill-0.site"),
    "site twice": (set_in("sites", ["a", "a", "b"]), "sites"),
    "link to itself": (set_in("links", 0, "between", ["a", "a"]), "links.between"),
    "link twice": (set_in("links", [{"between": ["a", "b"]}, {"between": ["b", "a"]}]), "links.between"),
    "rate 0": (set_in("links", 0, "emulate", "rate_mbit_s", 0), "rate_mbit_s"),
    "rate infinite": (set_in("links", 0, "emulate", "rate_mbit_s", float("inf")), "rate_mbit_s"),
    "rate absurd": (set_in("links", 0, "emulate", "rate_mbit_s", 1e300), "rate_mbit_s"),
    "budget infinite": (set_in("policy", "direct_budget_s", float("inf")), "policy.direct_budget_s"),
    "port of both doors": (set_in("serving", "grpc_port", 8000), "serving.grpc_port"),
    "port 0": (set_in("serving", "http_port", 0), "serving.http_port"),
    "no main": (set_in("workers", 2, "role", "relay"), "'main'"),
    "second tier without a first": (set_second_tier_alone, "host_cache_mib"),
    "graphs on a CPU": (set_in("workers", 2, "decode_graphs", "on"), "decode_graphs: given 'on' for torch on device 'cpu'"),
    "a core that is true": (set_in("workers", 0, "cpus", [True]), "workers.0.cpus: given [True], allowed a list"),
    "a core twice": (set_in("workers", 0, "cpus", [0, 0]), "workers.0.cpus: given [0, 0]"),
    "a core below 0": (set_in("workers", 0, "cpus", [-1]), "workers.0.cpus: given [-1]"),
    "no cores": (set_in("workers", 0, "cpus", []), "workers.0.cpus: given []"),
    "cores as text": (set_in("workers", 0, "cpus", "0-1"), "workers.0.cpus: given '0-1', allowed a list"),
    "a name instead of a list": (set_in("sites", "a"), "sites: a list is expected (given 'a')"),
    "threads switched on": (set_in("workers", 0, "threads", True), "threads: given True, a number is expected"),
    "a port switched off": (set_in("serving", "http_port", False), "http_port: given False, a number is expected"),
    "threads absurd": (set_in("workers", 0, "threads", 100_000), "workers.0.threads"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_refused_naming_the_field(name: str, tmp_path: Path):
    change, named = MISTAKES[name]
    raw = raw_local()
    change(raw)
    file = tmp_path / "launch.yaml"
    file.write_text(yaml.safe_dump(raw))
    with pytest.raises(ValueError, match=r"launch\.yaml") as refused:
        load(file)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("engine", "device", "can"), [("torch", "cuda", True), ("torch", "cuda:1", True), ("torch", "cpu", False), ("jax", "cuda", False)]
)
def test_decode_steps_are_recorded_where_they_can_be_replayed(engine: str, device: str, can: bool):
    raw = raw_local()
    set_in("workers", 2, "engine", engine)(raw)
    set_in("workers", 2, "device", device)(raw)
    assert LaunchConfig.model_validate(raw).workers[2].can_replay == can


@pytest.mark.parametrize(("text", "wish"), [("on", "on"), ("off", "off"), ("'off'", "off"), ("auto", "auto")])
def test_a_bare_on_or_off_is_what_it_says(text: str, wish: str):
    """Which YAML takes for a truth value."""
    raw = raw_local()
    set_in("workers", 2, "run_ahead", yaml.safe_load(text))(raw)
    assert LaunchConfig.model_validate(raw).workers[2].run_ahead == wish


@pytest.mark.parametrize("text", ["workers: [", "[]", "", "model: \xff"])
def test_files_that_are_no_config(text: str, tmp_path: Path):
    file = tmp_path / "launch.yaml"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"launch\.yaml"):
        load(file)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: a\nsites: [a]\nmodel: b\n", "key 'model' is given twice"),
        ("serving: {site: a, site: b}", "key 'site' is given twice"),
        ("model: " + "[" * 3000, "nested too deep"),
    ],
    ids=["a key twice", "a key twice within", "deep"],
)
def test_what_yaml_itself_would_take_or_break_on(text: str, said: str, tmp_path: Path):
    file = tmp_path / "launch.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=said) as refused:
        load(file)
    assert len(str(refused.value).splitlines()) == 1


def test_a_missing_file_is_one_line(tmp_path: Path):
    with pytest.raises(ValueError, match="No such file") as refused:
        load(tmp_path / "nowhere.yaml")
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.name)
def test_shipped_configs_are_valid_and_a_written_one_reads_back(file: Path, tmp_path: Path):
    config = load(file)
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load(again) == config
