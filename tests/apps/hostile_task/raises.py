"""Cannot be imported."""

raise ZeroDivisionError("at import")
