"""`python -m pdgemm`."""

from pdgemm.cli import main

if __name__ == "__main__":
    main()
