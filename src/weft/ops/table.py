"""Factor rules that are one line of notation: operator -> rule, by the operator's name without overload.

Several lines may be tried in order (convolution has one for every number of image dimensions, attention one for three and
one for four dimensions). Arguments that are not tensors have no entry; a tensor argument that was not given is skipped.
"""

NOTATION: dict[str, tuple[str, ...]] = {
    "linear": ("b* i, o i, o -> b* o",),
    "mm": ("n k, k m -> n m",),
    "bmm": ("b n k, b k m -> b n m",),
    "addmm": ("n m, n k, k m -> n m", "m, n k, k m -> n m"),
    "baddbmm": ("b n m, b n k, b k m -> b n m",),
    "dot": ("k, k -> ",),
    "vdot": ("k, k -> ",),
    "inner": ("b* k, m k -> b* m",),
    "mv": ("n k, k -> n",),
    "embedding": ("v^ e, b* -> b* e",),
    "batch_norm": ("n+ c s+*, c, c, c, c -> n c s*",),
    "group_norm": ("n !c !s*, _, !c, !c -> n !c !s*",),
    "instance_norm": ("n c !s*, c, c, c, c -> n c !s*",),
    "scaled_dot_product_attention": ("b* h !s !d, b* h !t !d, b* h !t !e, b* h !s !t -> b* h !s !e",),
    "conv1d": ("n i !w, o i !x, o -> n o !w",),
    "conv2d": ("n i !h !w, o i !x !y, o -> n o !h !w",),
    "conv3d": ("n i !z !h !w, o i !x !y !u, o -> n o !z !h !w",),
    "conv_transpose1d": ("n i !w, i o !x, o -> n o !w",),
    "conv_transpose2d": ("n i !h !w, i o !x !y, o -> n o !h !w",),
    "conv_transpose3d": ("n i !z !h !w, i o !x !y !u, o -> n o !z !h !w",),
    "max_pool1d": ("n c !w -> n c !w",),
    "max_pool2d": ("n c !h !w -> n c !h !w",),
    "max_pool3d": ("n c !z !h !w -> n c !z !h !w",),
    "avg_pool1d": ("n c !w -> n c !w",),
    "avg_pool2d": ("n c !h !w -> n c !h !w",),
    "avg_pool3d": ("n c !z !h !w -> n c !z !h !w",),
    "adaptive_avg_pool1d": ("n c !w -> n c !w",),
    "adaptive_avg_pool2d": ("n c !h !w -> n c !h !w",),
    "adaptive_avg_pool3d": ("n c !z !h !w -> n c !z !h !w",),
    "max_pool2d_with_indices": ("n c !h !w -> n c !h !w, n c !h !w",),
    "max_unpool2d": ("n c !h !w, n c !x !y -> n c !z !u",),
    "adaptive_max_pool1d": ("n c !w -> n c !w, n c !w",),
    "adaptive_max_pool2d": ("n c !h !w -> n c !h !w, n c !h !w",),
    "adaptive_max_pool3d": ("n c !z !h !w -> n c !z !h !w, n c !z !h !w",),
    "upsample_nearest1d": ("n c !w -> n c !w",),
    "upsample_nearest2d": ("n c !h !w -> n c !h !w",),
    "upsample_nearest3d": ("n c !z !h !w -> n c !z !h !w",),
    "_upsample_nearest_exact1d": ("n c !w -> n c !w",),
    "_upsample_nearest_exact2d": ("n c !h !w -> n c !h !w",),
    "_upsample_nearest_exact3d": ("n c !z !h !w -> n c !z !h !w",),
    "_upsample_bilinear2d_aa": ("n c !h !w -> n c !h !w",),
    "_upsample_bicubic2d_aa": ("n c !h !w -> n c !h !w",),
    "upsample_linear1d": ("n c !w -> n c !w",),
    "upsample_bilinear2d": ("n c !h !w -> n c !h !w",),
    "upsample_bicubic2d": ("n c !h !w -> n c !h !w",),
    "upsample_trilinear3d": ("n c !z !h !w -> n c !z !h !w",),
    "pixel_shuffle": ("n !c !h !w -> n !c !h !w",),
    "pixel_unshuffle": ("n !c !h !w -> n !c !h !w",),
    "one_hot": ("b* -> b* !c",),
    "im2col": ("n !c !h !w -> n !c !l",),
    "col2im": ("n !c !l -> n !c !h !w",),
    "prelu": ("n c s*, c -> n c s*", "n c s*, !c -> n c s*"),
    "view_as_complex": ("b* !r -> b*",),
    "view_as_real": ("b* -> b* !r",),
    **dict.fromkeys(("cdist", "_cdist_forward", "_euclidean_dist"), ("b* n !d, b* m !d -> b* n m",)),
    "grid_sampler": ("n c !h !w, n !x !y !z -> n c !x !y", "n c !z !h !w, n !x !y !t !u -> n c !x !y !t"),
    "bilinear": ("b* i, b* j, o i j, o -> b* o",),
    "outer": ("n, m -> n m",),
    "channel_shuffle": ("n !c !h !w -> n !c !h !w",),
    "feature_dropout": ("n c !s* -> n c !s*",),
    "native_dropout": ("b* -> b*, b*",),
    "triu": ("b* !i !j -> b* !i !j",),
    "tril": ("b* !i !j -> b* !i !j",),
}

# Each output element depends on the elements at its own (broadcast) position alone.
POINTWISE = frozenset(
    """
    add sub mul div rsub pow neg abs sign exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin cos tan asin acos atan atan2
    sinh cosh tanh erf erfc sigmoid relu relu6 gelu silu mish hardswish hardsigmoid hardtanh leaky_relu elu selu celu softplus
    log_sigmoid logit threshold clamp clamp_min clamp_max clip minimum maximum fmin fmax floor ceil round trunc frac remainder fmod
    floor_divide true_divide where masked_fill eq ne lt le gt ge fill logical_and logical_or logical_not logical_xor bitwise_and bitwise_or
    bitwise_not bitwise_xor __and__ __or__ __xor__ __lshift__ __rshift__ isnan isinf isfinite nan_to_num lerp addcmul addcdiv dropout
    alpha_dropout to type_as clone contiguous detach alias zeros_like ones_like full_like rand_like randn_like empty_like
    _to_copy copy hypot xlogy heaviside sinc angle conj sgn square_ positive lift_fresh_copy lift multiply subtract divide negative absolute
    greater greater_equal less less_equal not_equal float_power fix deg2rad rad2deg softshrink hardshrink real imag polar complex logaddexp
    logaddexp2 broadcast_tensors copysign nextafter erfinv lgamma digamma i0 ldexp bitwise_left_shift bitwise_right_shift _conj resolve_conj
    resolve_neg isclose igamma igammac mvlgamma polygamma special_expit special_entr special_erfcx special_log_ndtr special_ndtr
    special_ndtri special_xlog1py special_xlogy special_i0 special_i0e special_i1 special_i1e
    special_bessel_j0 special_bessel_j1 special_zeta uniform normal_functional bernoulli exponential randint_like
    tanh_backward sigmoid_backward gelu_backward silu_backward mish_backward threshold_backward hardtanh_backward leaky_relu_backward
    elu_backward softplus_backward hardswish_backward hardsigmoid_backward logit_backward
    zero _fused_adam _fused_adamw _fused_sgd _fused_adagrad
    """.split()
)

# (operator, does the dimension's result depend on the whole dimension): every other dimension can be cut.
ALONG_DIM = frozenset(
    """
    softmax _softmax log_softmax _log_softmax cumsum cumprod logcumsumexp flip sort topk argsort glu kthvalue roll gather
    index_select scatter scatter_add cummax cummin logsumexp take_along_dim scatter_reduce index_add index_copy diff index_fill
    cross linalg_cross rot90 fft_fftshift fft_ifftshift _softmax_backward_data _log_softmax_backward_data
    """.split()
)

REDUCTIONS = frozenset(
    """
    sum mean amax amin max min any all argmax argmin var std prod norm linalg_vector_norm var_mean std_mean count_nonzero nansum nanmean
    median nanmedian mode aminmax quantile nanquantile
    """.split()
)
LOSSES = frozenset(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss kl_div".split()
)
# Losses of elements, too, with numbers between the tensors and the reduction: its position.
REDUCED_AT = {
    "binary_cross_entropy": 3, "binary_cross_entropy_with_logits": 4, "hinge_embedding_loss": 3, "margin_ranking_loss": 4,
    "poisson_nll_loss": 5,
}  # fmt: skip
CELLS = frozenset("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell".split())
FACTORIES = frozenset(
    "arange zeros ones full empty scalar_tensor eye linspace rand randn randint randperm tril_indices triu_indices hann_window".split()
)
SHAPED_LIKE = frozenset("new_zeros new_ones new_full new_empty".split())
