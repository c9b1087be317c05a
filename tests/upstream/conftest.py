"""Own minimal conftest for running the transformers common tests outside the repo (offline)."""

import os
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "true"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402

warnings.simplefilter(action="ignore", category=FutureWarning)

MARKERS = (
    "slow is_pipeline_test is_staging_test accelerate_tests not_device_test torch_compile_test torch_export_test "
    "flash_attn_test flash_attn_3_test flash_attn_4_test all_flash_attn_test training_ci tensor_parallel_ci fsdp_ci "
    "bitsandbytes generate onnx_export_test executorch_export_test is_training_test is_tensor_parallel_test is_fsdp_test is_expert_parallel_test"
).split()


def pytest_configure(config):
    for name in MARKERS:
        config.addinivalue_line("markers", f"{name}: transformers marker")


def pytest_addoption(parser):
    from transformers.testing_utils import pytest_addoption_shared

    pytest_addoption_shared(parser)


def pytest_terminal_summary(terminalreporter):
    # one line per distinct failure reason, to make a report easy to read
    failed = terminalreporter.stats.get("failed", [])
    if failed:
        terminalreporter.write_sep("-", "failures, short")
        for rep in failed:
            crash = getattr(getattr(rep.longrepr, "reprcrash", None), "message", "") or str(rep.longrepr)[-300:]
            terminalreporter.write_line(
                f"{rep.nodeid.split('::')[-1]}: {crash.splitlines()[0][:220] if crash else ''}"
            )
