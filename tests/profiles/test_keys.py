from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhelix.errors import DhelixError
from dhelix.profiles import keys
from dhelix.profiles.channels import nccl_setting
from dhelix.profiles.channels.nccl_setting import NcclSetting
from dhelix.profiles.keys import CollectiveKey, OperatorKey, PairKey

GEMM = OperatorKey("gemm", "bf16,bf16->bf16:nt:cublaslt", (8192, 4096, 1536), flops=1e11, bytes=92_274_688)
GATHER = CollectiveKey("all-gather", 1 << 26, 4)

families = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40)
operators = st.builds(
    OperatorKey,
    st.sampled_from(keys.OPERATOR_KINDS),
    families,
    st.lists(st.integers(1, 1 << 40), max_size=6).map(tuple),
)
collectives = st.builds(
    CollectiveKey,
    st.sampled_from(keys.COLLECTIVE_KINDS),
    st.integers(0, 1 << 40),
    st.integers(1, 64),
    st.integers(1, 1024),
    st.integers(1, 64),
    st.sampled_from(keys.IMPLEMENTATIONS),
    st.builds(
        lambda kind, channels, chunk: NcclSetting(kind[0], kind[1], channels, chunk),
        st.one_of(
            st.just(("", "")),
            st.tuples(st.sampled_from(nccl_setting.ALGORITHMS), st.sampled_from(nccl_setting.PROTOCOLS)),
        ),
        st.integers(0, nccl_setting.MOST_CHANNELS),
        st.just(0) | st.integers(nccl_setting.LEAST_CHUNK, 1 << 24),
    ),
)


def test_keys_read_as_the_documentation_shows_them() -> None:
    assert str(GEMM) == "gemm bf16,bf16->bf16:nt:cublaslt 8192x4096x1536"
    assert str(GATHER) == "all-gather 67108864B 4x1 groups=1 nccl"
    assert str(PairKey(GEMM, GATHER)) == f"{GEMM} + {GATHER}"


@given(operators | collectives)
def test_text_of_a_key_is_that_key(key: keys.Key) -> None:
    assert keys.parse(str(key)) == key


def test_work_is_no_part_of_a_key() -> None:
    assert keys.parse(str(GEMM)) == GEMM
    assert hash(keys.parse(str(GEMM))) == hash(GEMM)


def test_a_pair_knows_which_side_was_launched_first() -> None:
    assert PairKey(GEMM, GATHER) != PairKey(GATHER, GEMM)


def test_a_configured_collective_has_a_key_of_its_own() -> None:
    configured = replace(GATHER, configuration=NcclSetting("ring", "simple", 4))
    assert str(configured) == "all-gather 67108864B 4x1 groups=1 nccl ring/simple channels=4" and configured != GATHER


def test_groups_span_nodes() -> None:
    assert CollectiveKey("all-reduce", 1, 2, nodes=2).group_size == 4


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gemm",
        "gemm nt",
        "softmax bf16 8x8",
        "all-gather 67108864B 4x1 groups=1 nccl fast",
        "all-gather 67108864B 4x1 groups=1 nccl channels=1000",
        "gemm bf16 8x",
        "gemm bf16 8x8 ",
        "all-gather 12 4x1 groups=1 nccl",
        "all-gather 12B 4x1 groups=1 mpi",
        "all-gather -12B 4x1 groups=1 nccl",
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(DhelixError, match="is not the key"):
        keys.parse(text)
