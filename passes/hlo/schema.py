"""The part of XLA's `hlo.proto` and `xla_data.proto` that the passes read or write.

No maintained package ships Python classes for these files, so this module declares the few needed messages with
protobuf descriptors. Undeclared fields are kept as unknown fields and written back untouched. Field numbers are
XLA's (xla/service/hlo.proto, xla/xla_data.proto). XLA never reuses a field number, so this schema reads modules of
any version.
"""

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

_F = descriptor_pb2.FieldDescriptorProto
_KINDS = {
    "int32": _F.TYPE_INT32,
    "int64": _F.TYPE_INT64,
    "uint32": _F.TYPE_UINT32,
    "uint64": _F.TYPE_UINT64,
    "float": _F.TYPE_FLOAT,
    "double": _F.TYPE_DOUBLE,
    "bool": _F.TYPE_BOOL,
    "string": _F.TYPE_STRING,
    "bytes": _F.TYPE_BYTES,
}

# message -> (field, number, type). A trailing "*" means repeated; "map<k,v>" means a map.
_MESSAGES: dict[str, tuple[tuple[str, int, str], ...]] = {
    "Hlo": (("hlo_module", 1, "bytes"),),
    "Tile": (("dimensions", 1, "int64*"),),
    "Layout": (("minor_to_major", 1, "int64*"), ("tiles", 6, "Tile*"), ("memory_space", 8, "int64")),
    "Shape": (
        ("element_type", 2, "int32"),
        ("dimensions", 3, "int64*"),
        ("tuple_shapes", 4, "Shape*"),
        ("layout", 5, "Layout"),
    ),
    "ProgramShape": (("parameters", 1, "Shape*"), ("result", 2, "Shape"), ("parameter_names", 3, "string*")),
    "FrontendAttributes": (("map", 1, "map<string,string>"),),
    "OpMetadata": (("op_type", 1, "string"), ("op_name", 2, "string"), ("stack_frame_id", 15, "int32")),
    "FileLocation": (("file_name_id", 1, "int32"), ("function_name_id", 2, "int32"), ("line", 3, "int32")),
    "StackFrame": (("file_location_id", 1, "int32"), ("parent_frame_id", 2, "int32")),
    "StackFrameIndex": (
        ("file_names", 1, "string*"),
        ("function_names", 2, "string*"),
        ("file_locations", 3, "FileLocation*"),
        ("stack_frames", 4, "StackFrame*"),
    ),
    "Literal": (
        ("shape", 1, "Shape"),
        ("preds", 2, "bool*"),
        ("s32s", 4, "int32*"),
        ("s64s", 5, "int64*"),
        ("u32s", 6, "uint32*"),
        ("u64s", 7, "uint64*"),
        ("f32s", 8, "float*"),
        ("f64s", 9, "double*"),
        ("f16s", 11, "bytes"),
        ("bf16s", 13, "bytes"),
    ),
    "PaddingDimension": (("low", 1, "int64"), ("high", 2, "int64"), ("interior", 3, "int64")),
    "PaddingConfig": (("dimensions", 1, "PaddingDimension*"),),
    "DotDimensionNumbers": (
        ("lhs_contracting_dimensions", 1, "int64*"),
        ("rhs_contracting_dimensions", 2, "int64*"),
        ("lhs_batch_dimensions", 3, "int64*"),
        ("rhs_batch_dimensions", 4, "int64*"),
    ),
    "ScatterDimensionNumbers": (
        ("update_window_dims", 1, "int64*"),
        ("inserted_window_dims", 2, "int64*"),
        ("scatter_dims_to_operand_dims", 3, "int64*"),
        ("index_vector_dim", 4, "int64"),
        ("input_batching_dims", 5, "int64*"),
        ("scatter_indices_batching_dims", 6, "int64*"),
    ),
    "ConvolutionDimensionNumbers": (("kernel_output_feature_dimension", 4, "int64"),),
    "SliceDimensions": (("start", 1, "int64"), ("limit", 2, "int64"), ("stride", 3, "int64")),
    "ReplicaGroup": (("replica_ids", 1, "int64*"),),
    "SourceTarget": (("source", 1, "int64"), ("target", 2, "int64")),
    "IotaReplicaGroupList": (
        ("num_replica_groups", 1, "int64"),
        ("num_devices_per_group", 2, "int64"),
        ("iota_reshape_dims", 3, "int64*"),
        ("iota_transpose_perm", 4, "int32*"),
    ),
    "CollectiveDeviceList": (
        ("replica_groups", 1, "ReplicaGroup*"),
        ("iota_replica_group_list", 2, "IotaReplicaGroupList"),
    ),
    "MeshAxis": (("name", 1, "string"), ("size", 2, "int64")),
    "DeviceIota": (("reshape_dims", 1, "int64*"), ("transpose_perm", 2, "int32*")),
    "Mesh": (("axes", 1, "MeshAxis*"), ("device_ids", 2, "int64*"), ("iota", 3, "DeviceIota")),
    "SubAxis": (("pre_size", 1, "int64"), ("size", 2, "int64")),
    "AxisRef": (("mesh_axis_index", 1, "int64"), ("sub_axis", 2, "SubAxis")),
    "MeshAxesReplicaGroupList": (("mesh", 1, "Mesh"), ("axes", 2, "AxisRef*")),
    "DimSharding": (("axes", 1, "AxisRef*"), ("is_closed", 2, "bool")),
    "NamedSharding": (("mesh", 2, "Mesh"), ("dim_shardings", 3, "DimSharding*")),
    "OpSharding": (
        ("type", 1, "int32"),
        ("tile_assignment_dimensions", 3, "int64*"),
        ("tile_assignment_devices", 4, "int64*"),
        ("replicate_on_last_tile_dim", 6, "bool"),
        ("last_tile_dims", 8, "int32*"),
        ("iota_reshape_dims", 9, "int64*"),
        ("iota_transpose_perm", 10, "int32*"),
        ("named_sharding", 14, "NamedSharding"),
    ),
    "OutputOperandAliasing": (
        ("output_shape_index", 1, "int64*"),
        ("operand_index", 2, "int64"),
        ("operand_shape_index", 3, "int64*"),
    ),
    "Instruction": (
        ("name", 1, "string"),
        ("opcode", 2, "string"),
        ("shape", 3, "Shape"),
        ("metadata", 7, "OpMetadata"),
        ("literal", 8, "Literal"),
        ("parameter_number", 9, "int64"),
        ("fusion_kind", 11, "string"),
        ("tuple_index", 13, "int64"),
        ("dimensions", 14, "int64*"),
        ("convolution_dimension_numbers", 16, "ConvolutionDimensionNumbers"),
        ("slice_dimensions", 17, "SliceDimensions*"),
        ("dynamic_slice_sizes", 20, "int64*"),
        ("padding_config", 21, "PaddingConfig"),
        ("channel_id", 26, "int64"),
        ("custom_call_target", 28, "string"),
        ("dot_dimension_numbers", 30, "DotDimensionNumbers"),
        ("gather_slice_sizes", 34, "int64*"),
        ("id", 35, "int64"),
        ("operand_ids", 36, "int64*"),
        ("control_predecessor_ids", 37, "int64*"),
        ("called_computation_ids", 38, "int64*"),
        ("sharding", 40, "OpSharding"),
        ("backend_config", 43, "bytes"),
        ("is_host_transfer", 47, "bool"),
        ("scatter_dimension_numbers", 48, "ScatterDimensionNumbers"),
        ("replica_groups", 49, "ReplicaGroup*"),
        ("source_target_pairs", 52, "SourceTarget*"),
        ("comparison_direction", 63, "string"),
        ("custom_call_has_side_effect", 65, "bool"),
        ("frontend_attributes", 68, "FrontendAttributes"),
        ("use_global_device_ids", 71, "bool"),
        ("output_operand_aliasing", 74, "OutputOperandAliasing*"),
        ("async_execution_thread", 79, "string"),
        ("collective_device_list", 87, "CollectiveDeviceList"),
        ("is_composite", 89, "bool"),
        ("iota_replica_groups", 92, "IotaReplicaGroupList"),
        ("mesh_replica_groups", 93, "MeshAxesReplicaGroupList"),
    ),
    "Computation": (
        ("name", 1, "string"),
        ("instructions", 2, "Instruction*"),
        ("program_shape", 4, "ProgramShape"),
        ("id", 5, "int64"),
        ("root_id", 6, "int64"),
    ),
    "AliasEntry": (
        ("output_shape_index", 1, "int64*"),
        ("parameter_number", 2, "int64"),
        ("parameter_shape_index", 3, "int64*"),
    ),
    "InputOutputAlias": (("entries", 1, "AliasEntry*"),),
    "InstructionSequence": (("instruction_ids", 1, "int64*"),),
    "Schedule": (("sequences", 1, "map<int64,InstructionSequence>"),),
    "ComputationDevice": (("replica_device_ids", 1, "int64*"),),
    "DeviceAssignment": (
        ("replica_count", 1, "int32"),
        ("computation_count", 2, "int32"),
        ("computation_devices", 3, "ComputationDevice*"),
    ),
    "Module": (
        ("name", 1, "string"),
        ("entry_computation_name", 2, "string"),
        ("computations", 3, "Computation*"),
        ("host_program_shape", 4, "ProgramShape"),
        ("id", 5, "int64"),
        ("entry_computation_id", 6, "int64"),
        ("schedule", 7, "Schedule"),
        ("input_output_alias", 8, "InputOutputAlias"),
        ("device_assignment", 15, "DeviceAssignment"),
        ("stack_frame_index", 17, "StackFrameIndex"),
        ("frontend_attributes", 19, "FrontendAttributes"),
    ),
}


def _set_type(field: descriptor_pb2.FieldDescriptorProto, kind: str) -> None:
    if kind in _KINDS:
        field.type = _KINDS[kind]
    else:
        field.type, field.type_name = _F.TYPE_MESSAGE, f".dhelix.{kind}"


def _build() -> dict[str, type]:
    file = descriptor_pb2.FileDescriptorProto(name="dhelix/hlo.proto", package="dhelix", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, number, kind in fields:
            field = message.field.add(name=field_name, number=number, label=_F.LABEL_OPTIONAL)
            if kind.startswith("map<"):
                key, value = kind[4:-1].split(",")
                entry = message.nested_type.add(name=f"{field_name.title().replace('_', '')}Entry")
                entry.options.map_entry = True
                for n, part in enumerate((key, value), 1):
                    _set_type(entry.field.add(name=("key", "value")[n - 1], number=n, label=_F.LABEL_OPTIONAL), part)
                field.label, field.type = _F.LABEL_REPEATED, _F.TYPE_MESSAGE
                field.type_name = f".dhelix.{name}.{entry.name}"
                continue
            if kind.endswith("*"):
                field.label, kind = _F.LABEL_REPEATED, kind[:-1]
            _set_type(field, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {n: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"dhelix.{n}")) for n in _MESSAGES}


_CLASSES = _build()
HloProto = _CLASSES["Hlo"]
ModuleProto = _CLASSES["Module"]
ComputationProto = _CLASSES["Computation"]
InstructionProto = _CLASSES["Instruction"]
Shape = _CLASSES["Shape"]


def wrapped(data: bytes) -> bytes | None:
    """The module inside an HloProto, or the HloProto inside an HloSnapshot; None for other data.

    XLA writes an HloProto with `--xla_dump_hlo_as_proto`.
    """
    try:
        return HloProto.FromString(data).hlo_module or None
    except DecodeError:
        return None


def looks_like_module(data: bytes) -> bool:
    try:
        proto = ModuleProto.FromString(data)
    except DecodeError:
        return False
    return bool(proto.computations) and any(c.id == proto.entry_computation_id for c in proto.computations)
