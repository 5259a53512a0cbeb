"""The program `assay`."""

import sys


def main() -> int:
    """Run the command line. Ctrl-C while its modules are imported ends the program as it does later."""
    try:
        from assay.cli.main import main as run_command_line
    except KeyboardInterrupt:
        print("assay: stopped", file=sys.stderr)
        return 130
    return run_command_line()


if __name__ == "__main__":
    raise SystemExit(main())
