"""The exceptions of the package."""


class BskError(Exception):
    """Base of everything this package raises on purpose."""


class InvalidInput(BskError, ValueError):
    """An argument has a wrong value, shape, device or content."""


class InvalidType(InvalidInput, TypeError):
    """An argument has a wrong type, dtype or layout."""


class Unsupported(BskError, NotImplementedError):
    """The request is meaningful, but the implementation asked for cannot serve it here."""


class OutOfPages(BskError, RuntimeError):
    """A paged cache has fewer free pages than a request needs; nothing was changed."""
