"""``python -m protwin`` is ``protwin``; protwin itself is a namespace, so this module is all that it holds."""

from protwin.shared.cli.main import main

main()
