"""The step of `undecorated.py` has its own loop over micro-batches. It needs only the decorator."""

from undecorated import inputs, train_step

from dhelix import strand_interleave

step = strand_interleave(train_step, donate_argnums=0)


def main() -> None:
    params, batch = inputs()
    for _ in range(10):
        params, loss = step(params, batch)
        print(f"loss {loss:.4f}")
    step.report(params, batch).print()


if __name__ == "__main__":
    main()
