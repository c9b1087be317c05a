import json
import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import quickstart


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--from_scratch"]], ids=["converted", "from scratch"])
def test_the_main_job_runs_to_its_table(flags, tmp_path, capsys):
    flags = [*flags, "--pretraining_steps", "4", "--num_train_epochs", "0.02", "--batch_size", "8"]
    results = quickstart.main(["--output_dir", str(tmp_path), *flags])
    assert results == json.loads((tmp_path / "all_results.json").read_text())
    assert results["mlm_loss_after"] < results["mlm_loss_before"]
    assert results["accuracy, majority"] == pytest.approx(0.202, abs=0.01)  # one topic in five
    assert results["accuracy, TF-IDF + logistic regression"] > 0.85
    printed = capsys.readouterr().out
    assert all(sentence in printed for sentence in quickstart.MASKED_SENTENCES + quickstart.TEXTS)
    with pytest.raises(ValueError, match="already holds a run"):
        quickstart.main(["--output_dir", str(tmp_path), *flags])
