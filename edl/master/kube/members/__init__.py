"""Names, builds and reads member pods (workers, teachers, masters), and records their ends."""

__all__: list[str] = []
