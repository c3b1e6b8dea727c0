"""Settings of `benchmarks.compile_all`: slices, gin files and flags by name."""

_PRETRAIN = "--gin_file=gin_configs/runs/pretrain.gin"
_FINETUNE = [
    "--gin_file=gin_configs/runs/finetune.gin",
    "--gin_file=gin_configs/tasks/squad.gin",
    "--gin.START='runs/blockwise_1b5'",
]
_DECODE = ["--program=decode", "--gin.TransformerConfig.param_dtype='bfloat16'"]
_FROZEN = ["--program=frozen", "--gin.HeadsTrainConfig.mesh=@MeshConfig()"]
_DRAFTER = [
    *_FROZEN,
    "--gin_file=gin_configs/models/blockwise_1b5.gin",
    "--gin_file=gin_configs/runs/drafter.gin",
    "--gin.MODEL='runs/blockwise_1b5'",
    "--gin.DATA='runs/texts'",
    "--gin.FEATURE_LAYERS=(1, 9, 16)",
]
_VICUNA_RESCORER = [
    "--gin_file=experiments/vicuna/rescorer.gin",
    "--gin.TEXT_FILES='texts'",
]
# One prompt at a time, as in Table E.
_ALONE = [
    "--program=decode",
    "--batch_size=1",
    "--prompt_tokens=1024",
    "--max_new_tokens=512",
    "--num_ngrams=4000000",
]
# Slices for decoding with Vicuna one prompt at a time, and the degree of tensor
# parallelism. One A100, as in Table E.
_VICUNA_SLICES = {
    "v5e_4": ("v5e:2x2", ["--gin.MeshConfig.model=4"]),
    "v4_8": ("v4:2x2x1", ["--gin.MeshConfig.model=8"]),
    "a100": ("a100:1", []),
    "h100": ("h100:1", []),
}
# The methods of Table E besides the n-grams.
_TABLE_E = {
    "plain": ["--method=greedy"],
    "bpd": ["--method=bpd"],
    "neural": ["--method=neural", "--rescorer=gin_configs/models/rescorer_vicuna.gin"],
    "medusa": ["--method=medusa:64"],
    "medusa_neural": [
        "--method=medusa_neural:64:order=block",
        "--rescorer=gin_configs/models/rescorer_vicuna.gin",
    ],
}
# Slices for batches, with the number of devices that share each row.
_BATCH_SLICES = {
    "v5e_4": ("v5e:2x2", 4),
    "v5e_16": ("v5e:4x4", 4),
    "v4_16": ("v4:2x2x2", 4),
    "h100": ("h100:1", 1),
    "h100_8": ("h100:8", 4),
}


def _batch(model: list[str], size: int, parts: int) -> list[str]:
    """Decoding of texts of 2,048 tokens by the default method of models with heads."""
    return [
        *model,
        "--program=decode",
        "--method=bpd",
        f"--batch_size={size}",
        "--prompt_tokens=1536",
        "--max_new_tokens=512",
        f"--gin.MeshConfig.model={parts}",
    ]


def _mesh(name: str) -> str:
    return f"--gin_file=gin_configs/meshes/{name}.gin"


def _vicuna(size: str) -> list[str]:
    """Vicuna with four draft heads, the rebuttal's model."""
    return [
        "--gin_file=experiments/vicuna/joint.gin",
        f"--gin_file=gin_configs/models/vicuna_{size}.gin",
        "--gin.START='vicuna'",
        "--gin.TEXT_FILES='texts'",
    ]


def _vicuna_training(size: str, mesh: str) -> list[str]:
    """Joint training of Vicuna and its heads."""
    return [
        *_vicuna(size),
        _mesh(mesh),
        "--gin.TransformerConfig.param_dtype='float32'",
    ]


def _vicuna_heads(size: str, hidden: int) -> list[str]:
    """Training of the four heads alone, on the frozen Vicuna."""
    return [
        *_FROZEN,
        f"--gin_file=gin_configs/models/vicuna_{size}.gin",
        "--gin_file=experiments/vicuna/heads.gin",
        "--gin.MODEL='vicuna'",
        "--gin.DATA='texts'",
        f"--gin.HIDDEN={hidden}",
        "--gin.MeshConfig.fsdp=8",
    ]


# Name: topology, and further arguments of the command.
SETTINGS: dict[str, tuple[str, list[str]]] = {
    "v4_128": ("v4:4x4x4", [_PRETRAIN, _mesh("v4_128")]),
    "joint_drafter_v4_128": (
        "v4:4x4x4",
        [
            _PRETRAIN,
            "--gin_file=gin_configs/heads/drafter.gin",
            "--gin.FEATURE_LAYERS=(1, 9, 16)",
            _mesh("v4_128"),
        ],
    ),
    "v4_128_plain": (
        "v4:4x4x4",
        [
            _PRETRAIN,
            "--gin.MeshConfig.fsdp=64",
            "--gin.ComputeConfig.attention='xla'",
            "--gin.ComputeConfig.scan_layers=True",
        ],
    ),
    "v4_64_megacore": ("v4-megacore:4x4x4", [_PRETRAIN, _mesh("v4_128")]),
    "v5e_256": ("v5e:16x16", [_PRETRAIN, _mesh("v5e_256")]),
    "v5p_128": ("v5p:4x4x8", [_PRETRAIN, _mesh("v5p_128")]),
    "v6e_256": ("v6e:16x16", [_PRETRAIN, _mesh("v6e_256")]),
    "124m_two_v5e_16": (
        "v5e:4x4",
        [
            "--slices=2",
            _PRETRAIN,
            "--gin_file=gin_configs/models/blockwise_124m.gin",
            _mesh("v5e_256"),
            "--gin.MeshConfig.fsdp=16",
            "--gin.BATCH_SIZE=256",
        ],
    ),
    "a100_8": ("a100:8", [_PRETRAIN, _mesh("gpu_8")]),
    "h100_1": ("h100:1", [_PRETRAIN, _mesh("one_device")]),
    "h100_8": ("h100:8", [_PRETRAIN, _mesh("gpu_8")]),
    "finetune_v4_8": ("v4:2x2x1", [*_FINETUNE, _mesh("finetune_8")]),
    "finetune_v5e_8": ("v5e:2x4", [*_FINETUNE, _mesh("finetune_8")]),
    "decode_v4_8": (
        "v4:2x2x1",
        [_PRETRAIN, *_DECODE, "--gin.MeshConfig.data=2", "--gin.MeshConfig.model=4"],
    ),
    "decode_h100": ("h100:1", [_PRETRAIN, *_DECODE]),
    "drafter_v5e_8": ("v5e:2x4", _DRAFTER),
    "drafter_h100_8": ("h100:8", _DRAFTER),
    **{
        f"vicuna_{size}_decode_{name}": (topology, [*_vicuna(size), *mesh, *_ALONE])
        for name, (topology, mesh) in _VICUNA_SLICES.items()
        for size in ("7b", "13b")
    },
    **{
        f"vicuna_7b_{name}_v5e_4": (
            "v5e:2x2",
            [*_vicuna("7b"), "--gin.MeshConfig.model=4", *_ALONE, *method],
        )
        for name, method in _TABLE_E.items()
    },
    **{
        f"{name}_batch_{slice_name}": (topology, _batch(model, 8, parts))
        for slice_name, (topology, parts) in _BATCH_SLICES.items()
        for name, model in (
            ("1b5", [_PRETRAIN, "--gin.TransformerConfig.param_dtype='bfloat16'"]),
            ("vicuna_7b", _vicuna("7b")),
            ("vicuna_13b", _vicuna("13b")),
        )
    },
    # Its three key-value heads are not divided: every device has whole rows.
    **{
        f"smollm2_batch_{slice_name}": (
            topology,
            _batch(
                [_PRETRAIN, "--gin_file=gin_configs/models/smollm2_135m.gin"], 16, 1
            ),
        )
        for slice_name, (topology, _) in _BATCH_SLICES.items()
    },
    "vicuna_7b_train_v4_128": ("v4:4x4x4", _vicuna_training("7b", "v4_128")),
    "vicuna_13b_train_v5e_256": (
        "v5e:16x16",
        [*_vicuna_training("13b", "v5e_256"), "--gin.BATCH_SIZE=256"],
    ),
    "vicuna_7b_train_h100_8": ("h100:8", _vicuna_training("7b", "gpu_8")),
    "vicuna_13b_train_h100_8": ("h100:8", _vicuna_training("13b", "gpu_8")),
    **{
        f"vicuna_{size}_heads_{name}": (topology, _vicuna_heads(size, hidden))
        for name, topology in (("v5e_8", "v5e:2x4"), ("h100_8", "h100:8"))
        for size, hidden in (("7b", 8192), ("13b", 10240))
    },
    "vicuna_rescorer_v5e_8": ("v5e:2x4", _VICUNA_RESCORER),
    "vicuna_rescorer_h100_8": ("h100:8", _VICUNA_RESCORER),
}
