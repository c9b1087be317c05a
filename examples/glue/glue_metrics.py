"""The official metrics of GLUE and IMDB, and those for your own data, without a download.

metric = evaluate.load("path/to/glue_metrics.py", "mrpc")
metric.compute(predictions=[0, 1], references=[0, 1])  # {"accuracy": 1.0, "f1": 1.0}
"""

import datasets
import evaluate
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef


_DESCRIPTION = "Metrics for text classification and regression, one configuration for each task."
_CITATION = """\
@inproceedings{wang2019glue,
  title={{GLUE}: A Multi-Task Benchmark and Analysis Platform for Natural Language Understanding},
  author={Wang, Alex and Singh, Amanpreet and Michael, Julian and Hill, Felix and Levy, Omer and Bowman, Samuel R.},
  booktitle={International Conference on Learning Representations},
  year={2019}
}
"""
_INPUTS = """
Args:
    predictions: Class indices, or values for a regression.
    references: The same, as they should be.
"""

METRICS = {
    "accuracy": accuracy_score,
    "f1": f1_score,
    "macro_f1": lambda references, predictions: f1_score(references, predictions, average="macro"),
    "matthews_correlation": matthews_corrcoef,
    "pearson": lambda references, predictions: pearsonr(references, predictions).statistic,
    "spearman": lambda references, predictions: spearmanr(references, predictions).statistic,
}
TASKS = {
    "cola": ("matthews_correlation",),
    "sst2": ("accuracy",),
    "mrpc": ("accuracy", "f1"),
    "qqp": ("accuracy", "f1"),
    "stsb": ("pearson", "spearman"),
    "mnli": ("accuracy",),
    "qnli": ("accuracy",),
    "rte": ("accuracy",),
    "wnli": ("accuracy",),
    "imdb": ("accuracy",),
    "classification": ("accuracy", "macro_f1"),
    "regression": ("pearson", "spearman"),
}


class GlueMetrics(evaluate.Metric):
    """The metrics of a task, chosen with the configuration name."""

    def _info(self) -> evaluate.MetricInfo:
        if self.config_name not in TASKS:
            raise ValueError(f"Unknown task {self.config_name!r}; choose one of {', '.join(TASKS)}")
        kind = datasets.Value("float64" if "pearson" in TASKS[self.config_name] else "int64")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": kind, "references": kind}),
        )

    def _compute(self, predictions: list, references: list) -> dict[str, float]:
        return {name: float(METRICS[name](references, predictions)) for name in TASKS[self.config_name]}
