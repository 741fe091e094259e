"""`python -m pdgemm`."""

from pdgemm.cli.commands import main

if __name__ == "__main__":
    main()
