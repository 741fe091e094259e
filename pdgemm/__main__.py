"""`python -m pdgemm COMMAND ...` is the command line; `python -m pdgemm SCRIPT ...` runs a script."""

import sys

from pdgemm.tools.cli import commands, script

if __name__ == "__main__":
    if script.is_script(sys.argv[1:]):
        script.run_script(sys.argv[1:])
    commands.main()
