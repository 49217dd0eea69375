"""`python -m hybridkv`."""

from hybridkv.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
