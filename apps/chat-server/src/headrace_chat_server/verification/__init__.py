"""`headrace doctor --verify`: the numeric laws, run on the user's own device."""
