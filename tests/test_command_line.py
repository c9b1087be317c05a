import pytest
from conftest import build
from transformers import BertConfig, BertModel

from linformer_hf import command_line, convert_fairseq, convert_hf, lengthen


COMMANDS = {
    "convert_hf": (convert_hf.main, []),
    "convert_fairseq": (convert_fairseq.main, []),
    "lengthen": (lengthen.main, ["--max_position_embeddings", "100"]),
}

every_command = pytest.mark.parametrize("command", COMMANDS)


def run(command, *arguments):
    main, flags = COMMANDS[command]
    main([*map(str, arguments), *flags])


@every_command
def test_an_output_that_holds_something_is_kept(command, tmp_path):
    output = tmp_path / "new"
    output.mkdir()
    (output / "model.safetensors").write_text("precious")
    with pytest.raises(
        ValueError, match="is in use: choose another folder, or replace it with --overwrite_output_dir"
    ):
        run(command, tmp_path / "source", output)
    assert (output / "model.safetensors").read_text() == "precious"
    with pytest.raises(ValueError, match="is in use"):
        run(command, tmp_path / "source", output / "model.safetensors")


@every_command
def test_an_output_that_holds_the_source_is_refused(command, tmp_path):
    source = tmp_path / "folder" / "source"
    source.mkdir(parents=True)
    (source / "model.safetensors").write_text("precious")
    for output in (source, source.parent):
        with pytest.raises(ValueError, match="holds the source"):
            run(command, source, output, "--overwrite_output_dir")
    assert (source / "model.safetensors").read_text() == "precious"


@pytest.mark.parametrize("model_type", ["linformer", "bert"])
def test_a_source_without_tokenizer_is_refused(model_type, tmp_path):
    source = tmp_path / "source"
    model = (
        build()
        if model_type == "linformer"
        else BertModel(BertConfig(hidden_size=12, num_hidden_layers=1, num_attention_heads=1))
    )
    model.save_pretrained(source)
    with pytest.raises(ValueError, match="source has no tokenizer: add its files"):
        command_line.load_tokenizer(str(source))
    if model_type == "bert":
        with pytest.raises(ValueError, match="source has no tokenizer: add its files"):
            run("convert_hf", source, tmp_path / "new")
        assert not (tmp_path / "new").exists()
        return
    run("lengthen", source, tmp_path / "new")  # what it does needs none
    assert (tmp_path / "new" / "config.json").exists()
    assert not list((tmp_path / "new").glob("tokenizer*"))


def test_what_was_there_stays_if_something_goes_wrong(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("no space left")

    *_, paths = command_line.parse_arguments(
        name="lengthen",
        description="",
        source_help="",
        argv=["source", str(tmp_path / "new"), "--overwrite_output_dir"],
    )
    command_line.save(build(), None, paths)
    before = {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    assert {"config.json", "model.safetensors", "README.md"} <= before.keys()
    assert b"python -m linformer_hf.lengthen source " in before["README.md"]
    monkeypatch.setattr(command_line, "write_model_card", fail)
    with pytest.raises(OSError, match="no space left"):
        command_line.save(build(seed=1), None, paths)
    assert {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
