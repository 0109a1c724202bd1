"""`trireme predict MODEL INPUT -o OUT`: scores files with an exported model; thin over `trainer.predict`."""

import argparse
from pathlib import Path

from pipelines.flags import count, exit_codes
from trainer.errors import EXIT_DONE


def add_predict_command(commands: argparse._SubParsersAction) -> None:
    """Puts the command into the command line."""
    parser = commands.add_parser(
        "predict",
        help="score images, tables, texts or a prepared split with a model",
        description="Score images, tables, texts or a prepared split with a model, through its serving signature.",
        epilog=exit_codes(),
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a version's folder or gs:// prefix, or a trained model's folder"
    )
    parser.add_argument("input", type=Path, metavar="INPUT",
                        help="an image, a folder of images, a .csv, .jsonl or .txt file, or a prepared dataset")  # fmt: skip
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="OUT", help="where the scores go: a .jsonl or .csv file"
    )
    parser.add_argument(
        "--split", default="test", metavar="NAME", help="split of a prepared dataset (default: %(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=count, default=64, metavar="N", help="examples of one call (default: %(default)s)"
    )
    parser.set_defaults(command=_predict)


def _predict(arguments: argparse.Namespace) -> int:
    import os

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from trainer.predict import predict

    predict(arguments.model, arguments.input, arguments.output, split=arguments.split, batch_size=arguments.batch_size)
    return EXIT_DONE
