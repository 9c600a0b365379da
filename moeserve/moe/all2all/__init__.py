"""How rows travel to the owners of their experts and back: one file per transport, `local` is the specification."""
