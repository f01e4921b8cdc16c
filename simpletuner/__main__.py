"""Run `python -m simpletuner`: the form in which the launcher starts each rank."""

from simpletuner.app import main

if __name__ == "__main__":
    main()
