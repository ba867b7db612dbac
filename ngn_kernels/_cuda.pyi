LAYOUT_CHECKSUM: int
SOURCES_CHECKSUM: int
THREADS: int
TARGETS: str  # architectures with code of their own: "75 80"
COMPILER: str  # version of nvcc

class NoDriver(RuntimeError): ...
class DriverError(RuntimeError): ...

class Engine:
    def __init__(self, library: str) -> None: ...
    def load(self, device: int) -> None: ...

# Addresses are of the device's memory; the rule is bits of layout.Flag, types and roundings
# are numbers of layout.py's enums.
class Launch:
    def __init__(
        self,
        *,
        engine: Engine,
        device: int,
        updates: bool,
        rule: int,
        table: int,
        rows: int,
        chunks: int,
        chunk_count: int,
        chunk_size: int,
        groups: int,
        group_count: int,
        inputs: int,
        sums: int,
        totals: int,
        bucket_count: int,
        index: int,
        partials: int,
        counts: int,
        sizes: int,
        ticket: int,
        x_type: int,
        g_type: int,
        m_type: int,
        v_type: int,
        rounding: int,
    ) -> None: ...
    def __call__(self, stream: int, last: bool = False) -> None: ...
    @property
    def name(self) -> str: ...

def image() -> bytes: ...
