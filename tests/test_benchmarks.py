import json
import os
import sys
from pathlib import Path

import pytest
import torch


sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "benchmarks"))

import benchmark
import peers
import plot
from measuring import Records, interleaved_medians


def record(measure, model, length, k=0, **figures):
    shared = {
        "dtype": "bfloat16",
        "heads": 12,
        "layers": 3,
        "machine": "m",
        "torch": "t",
        "transformers": "v",
        "commit": "c",
    }
    return {"measure": measure, "model": model, "length": length, "projected_length": k, **shared, **figures}


def write(path, records):
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return str(path)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A run of one layer at 64 tokens, of all measures that a CPU has."""
    path = tmp_path_factory.mktemp("benchmark") / "figures.jsonl"
    models = ["linformer", "linformer_window", "roberta_sdpa", "floor"]
    arguments = ["--output_file", str(path), "--models", *models, "--lengths", "64", "--projected_lengths", "16"]
    arguments += ["--measures", "forward", "padding", "memory", "--num_hidden_layers", "1", "--repeats", "3"]
    benchmark.main([*arguments, "--threads", "1"])
    return path, arguments


def test_every_model_and_measure_has_a_record(measured):
    records = {(r["measure"], r["model"]): r for r in Records(str(measured[0])).records}
    models = ["linformer", "linformer_window", "roberta_sdpa", "floor"]
    for model in models:
        record = records[("forward", model)]
        assert ("failed" in record) or (0 < record["quartiles"][0] <= record["seconds"] <= record["quartiles"][1])
        assert (record["length"], record["layers"], record["dtype"], record["batch_size"]) == (64, 1, "bfloat16", 1)
    assert {model for measure, model in records if measure == "memory"} == {*models} - {"floor"}
    padding = {model for measure, model in records if measure == "padding"}
    assert padding == {"linformer", "linformer_padded", "linformer_window", "linformer_window_padded"}
    assert records[("forward", "linformer")]["flops"] < records[("forward", "roberta_sdpa")]["flops"]
    assert records[("memory", "linformer")]["mib"] > 0


def test_a_run_goes_on_where_it_was(measured, monkeypatch):
    path, arguments = measured
    before = path.read_text()

    def refuse(*_):
        raise AssertionError("measured again")

    monkeypatch.setattr(benchmark, "in_own_process", refuse)
    benchmark.main([*arguments, "--threads", "1"])
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--models", "bert"], "--models bert"),
        (["--measures", "speed"], "--measures speed"),
        (["--measures", "largest_batch", "--device", "cpu"], "needs --device cuda"),
    ],
)
def test_wrong_requests_are_refused(tmp_path, wrong, told):
    with pytest.raises(ValueError, match=told):
        benchmark.main(["--output_file", str(tmp_path / "f.jsonl"), *wrong])


def test_a_model_that_fails_is_recorded_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "in_own_process", lambda function, *args: function(*args))
    monkeypatch.setattr(benchmark, "prepare", lambda args: None)
    monkeypatch.setitem(peers.MODELS, "longformer", lambda shape: {}["no such window"])
    path = str(tmp_path / "figures.jsonl")
    shared = ["--lengths", "64", "--num_hidden_layers", "1", "--repeats", "1", "--threads", "1"]
    benchmark.main(["--output_file", path, "--models", "longformer", "fnet", *shared])
    records = {(r["measure"], r["model"]): r for r in Records(path).records}
    assert records[("forward", "longformer")]["failed"] == "KeyError: 'no such window'"
    assert records[("memory", "longformer")]["failed"] == "KeyError: 'no such window'"
    assert records[("forward", "fnet")]["seconds"] > 0


def test_a_process_that_dies_is_a_reason_too():
    assert "ended" in benchmark.in_own_process(os._exit, 1)["failed"]


@pytest.mark.parametrize("name", ["linformer", "linformer_window"])
def test_the_unavoidable_products_are_those_of_the_model(name):
    shape = peers.Shape(256, 32, layers=3)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        peers.unavoidable_products(name, shape)()
    products = counter.get_total_flops()
    # the global token's own attention to all tokens is not among them
    assert 0 <= benchmark.flops(name, shape) - products <= 3 * 4 * 256 * 768


def test_heads_that_fit():
    assert peers.transformer_heads_that_fit(1024, 1e12) == 12
    assert peers.transformer_heads_that_fit(16384, 7 * 8 * 16384**2) == 6
    assert peers.transformer_heads_that_fit(16384, 1) == 1


def test_medians_leave_out_the_first_run():
    calls = []
    medians = interleaved_medians({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2)
    assert calls == ["a", "b"] * 3
    assert set(medians) == {"a", "b"}


RECORDS = [
    *(record("forward", "linformer", n, 128, seconds=n / 4096, flops=n) for n in (4096, 16384, 65536)),
    *(record("forward", "roberta_sdpa", n, seconds=(n / 4096) ** 2, flops=n * n / 2048) for n in (4096, 16384)),
    record("forward", "roberta_eager", 16384, seconds=100.0, heads=6),
    record("forward", "floor", 4096, 128, seconds=0.5),
    record("forward", "fnet", 4096, failed="RuntimeError: no"),
    record("memory", "linformer", 4096, 128, mib=10.0),
    record("memory", "roberta_sdpa", 4096, mib=25.0),
    record("memory", "linformer", 65536, 128, mib=2048.0),
    record("padding", "linformer", 512, 128, seconds=1.0),
    record("padding", "linformer_padded", 512, 128, seconds=0.6),
]


def test_tables_and_goals(tmp_path):
    tables = plot.main(["--input_file", write(tmp_path / "f.jsonl", RECORDS)])
    saved, seconds, goals = (tables[name] for name in ("saved", "seconds", "goals"))
    assert "| 4096 | 1.0x / - | - / - | 2.5x / - | - / - |" in saved
    assert "| 16384 | 4.0x / 25.0x | - / - | - / - | - / - |" in saved
    assert "| fnet | failed |  |  |" in seconds
    assert "- fnet, n=4096: RuntimeError: no" in seconds
    assert any("with 6 heads" in line for line in seconds)
    assert "| linformer: time / unavoidable products, n=4096 | 2.00 | <= 1.30 | not met |" in goals
    assert "| times as fast as roberta_eager, n=16384 | 25.00 | >= 20.00 | met |" in goals
    assert "| times as fast as roberta_sdpa, n=16384 | 4.00 | >= 7.20 | not met |" in goals
    assert "| linformer: half padding / none, n=512 | 0.60 | <= 0.65 | met |" in goals
    assert "| linformer: GiB of a forward pass at 65536 | 2.00 | <= 1.50 | not met |" in goals
    assert "| linformer: seconds at 65536 / at 4096 | 16.00 | <= 17.60 | met |" in goals


def test_the_largest_batch_counts_as_memory_where_it_was_measured(tmp_path):
    more = [
        record("largest_batch", name, 4096, k, texts=t)
        for name, k, t in (("linformer", 128, 70), ("roberta_sdpa", 0, 10))
    ]
    saved = plot.main(["--input_file", write(tmp_path / "f.jsonl", RECORDS + more)])["saved"]
    assert "| 4096 | 1.0x / - | - / - | 7.0x / - | - / - |" in saved


def test_ratios_are_of_equal_numbers_of_layers(tmp_path):
    deep = [{**record("memory", "linformer", n, 128, mib=n / 64), "layers": 12} for n in (4096, 65536)]
    tables = plot.main(["--input_file", write(tmp_path / "f.jsonl", [*deep, *RECORDS])])
    assert "| linformer: mib at 65536 / at 4096 | 16.00 | <= 17.60 | met |" in tables["goals"]
    assert "| 4096 | 1.0x / - | - / - | 2.5x / - | - / - |" in tables["saved"]


def test_plots_lie_beside_what_was_there(tmp_path):
    source = write(tmp_path / "f.jsonl", RECORDS)
    plot.main(["--input_file", source, "--output_dir", str(tmp_path)])
    assert Path(source).exists()
    for name in ("time.png", "saved.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_nothing_to_show_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no forward passes in float32"):
        plot.main(["--input_file", write(tmp_path / "f.jsonl", RECORDS), "--dtype", "float32"])
