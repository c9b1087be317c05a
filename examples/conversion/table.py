"""Prints JSON lines of the conversion scripts as a markdown table; what is the same in all lines stands below it.

python examples/conversion/table.py --input_file runs/agreement.jsonl --sort_by speeches_spearman
"""

import sys
from dataclasses import dataclass, field
from typing import Any

import conversion_data  # noqa: F401  # makes the next found
from measuring import Records

from linformer_hf import training


@dataclass
class Arguments:
    """Which file, and what of it."""

    input_file: str = field(metadata={"help": "JSON lines."})
    columns: list[str] | None = field(
        default=None, metadata={"help": "What to show, in this order; all if not given."}
    )
    sort_by: str | None = field(default=None, metadata={"help": "Column to sort by, highest first."})


def text(value: Any) -> str:
    """A cell: four digits of numbers, the first and the last of a list."""
    if isinstance(value, list):
        return f"{text(value[0])} .. {text(value[-1])}" if value else ""
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def markdown(records: list[dict[str, Any]], columns: list[str]) -> str:
    """Makes the table.

    Args:
        records: The lines.
        columns: The names to show.

    Returns:
        The table; below it, the columns in which all lines agree.
    """
    cells = [[text(record.get(name)) for name in columns] for record in records]
    same = [len(records) > 1 and len({row[column] for row in cells}) == 1 for column in range(len(columns))]
    rows = [columns, ["---"] * len(columns), *cells]
    lines = [" | ".join(cell for cell, hide in zip(row, same, strict=True) if not hide) for row in rows]
    everywhere = [f"{name}: {cells[0][column]}" for column, name in enumerate(columns) if same[column]]
    return "\n".join(
        [f"| {line} |" for line in lines] + ([f"\nIn all rows: {', '.join(everywhere)}"] if everywhere else [])
    )


def main(argv: list[str] | None = None) -> dict[str, int]:
    (args,) = training.parse_arguments(Arguments, argv=argv)
    records = Records(args.input_file).records
    if not records:
        raise ValueError(f"--input_file {args.input_file} does not exist or has no lines: run a script that writes it")
    if args.sort_by:
        records.sort(key=lambda record: record.get(args.sort_by, float("-inf")), reverse=True)
    print(markdown(records, args.columns or list(dict.fromkeys(name for record in records for name in record))))
    return {"rows": len(records)}


if __name__ == "__main__":
    main(sys.argv[1:])
