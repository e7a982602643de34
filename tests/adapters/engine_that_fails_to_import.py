"""What a package with a mistake in it looks like to the registry."""

1 / 0  # noqa: B018 - it is imported for this alone
