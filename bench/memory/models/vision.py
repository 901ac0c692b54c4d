"""Models of images, volumes, rays and points. Each factory returns (module, batch); the module's output is its loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLES = 8
CLASSES = 10

Made = tuple[nn.Module, dict[str, Tensor]]
Size = int | tuple[int, int]


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, the same at every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(below: int, *shape: int, seed: int = 0) -> Tensor:
    """Integers from 0, the same at every call."""
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def labelled_images(size: int) -> dict[str, Tensor]:
    """Square images with a class each."""
    return {"images": normal(SAMPLES, 3, size, size), "labels": integers(CLASSES, SAMPLES)}


class Classifier(nn.Module):
    """A body that makes one vector of an image, and a head."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(images)), labels)


class ConvolutionUnit(nn.Sequential):
    """Convolution, batch norm, ReLU."""

    def __init__(self, inputs: int, outputs: int, window: Size, stride: int = 1, padding: Size = 0) -> None:
        super().__init__(nn.Conv2d(inputs, outputs, window, stride, padding, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class WindowAttention(nn.Module):
    """Attention inside windows, shifted by `shift`, with learned biases by relative position (Liu et al. 2021)."""

    def __init__(self, hidden: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads = heads
        self.window = window
        self.shift = shift
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, hidden)
        self.biases = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        places = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        between = (places[:, :, None] - places[:, None]).permute(1, 2, 0) + (window - 1)
        self.register_buffer("index", between[..., 0] * (2 * window - 1) + between[..., 1])

    def forward(self, x: Tensor) -> Tensor:
        samples, height, width, hidden = x.shape
        window = self.window
        tokens = window * window
        down, across = height // window, width // window
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        x = x.view(samples, down, window, across, window, hidden).permute(0, 1, 3, 2, 4, 5).reshape(-1, tokens, hidden)
        query, key, value = self.query_key_value(x).reshape(x.shape[0], tokens, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)
        scores = (query * (hidden // self.heads) ** -0.5) @ key.transpose(-2, -1)
        scores = scores + self.biases[self.index.view(-1)].view(tokens, tokens, -1).permute(2, 0, 1)[None]
        x = (scores.softmax(-1) @ value).transpose(1, 2).reshape(-1, tokens, hidden)
        x = self.output(x).view(samples, down, across, window, window, hidden)
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(samples, height, width, hidden)
        if self.shift:
            x = torch.roll(x, (self.shift, self.shift), (1, 2))
        return x


class SwinBlock(nn.Module):
    """Window attention and an MLP."""

    def __init__(self, hidden: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.attention = WindowAttention(hidden, heads, window, shift)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class PatchMerging(nn.Module):
    """Four neighbours become one place of twice the width."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * hidden)
        self.reduction = nn.Linear(4 * hidden, 2 * hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
        return self.reduction(self.norm(x))


class Swin(nn.Module):
    """Two resolutions of two blocks, one of each pair shifted."""

    def __init__(self, hidden: int = 48) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, 4, 4)
        self.layers = nn.Sequential(
            SwinBlock(hidden, 3, 4, 0),
            SwinBlock(hidden, 3, 4, 2),
            PatchMerging(hidden),
            SwinBlock(2 * hidden, 6, 4, 0),
            SwinBlock(2 * hidden, 6, 4, 2),
        )
        self.norm = nn.LayerNorm(2 * hidden)
        self.head = nn.Linear(2 * hidden, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.layers(self.patches(images).permute(0, 2, 3, 1))
        return F.cross_entropy(self.head(self.norm(x).mean((1, 2))), labels)


def swin() -> Made:
    """Swin transformer."""
    return Swin(), labelled_images(96)


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of an image."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNextBlock(nn.Module):
    """A depthwise convolution of 7 x 7 and an MLP with its channels last (Liu et al. 2022)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(hidden, hidden, 7, padding=3, groups=hidden)
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        self.scale = nn.Parameter(torch.full((hidden,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


def convnext() -> Made:
    """ConvNeXt."""
    body = nn.Sequential(
        nn.Conv2d(3, 48, 4, 4),
        ChannelNorm(48),
        ConvNextBlock(48),
        ConvNextBlock(48),
        ChannelNorm(48),
        nn.Conv2d(48, 96, 2, 2),
        ConvNextBlock(96),
        ConvNextBlock(96),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    return Classifier(body, nn.Linear(96, CLASSES)), labelled_images(128)


class SqueezeExcite(nn.Module):
    """Scales channels by what the whole image says of them."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, squeezed, 1)
        self.excite = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        mean = F.adaptive_avg_pool2d(x, 1)
        return x * torch.sigmoid(self.excite(F.silu(self.squeeze(mean))))


class InvertedBottleneck(nn.Module):
    """MBConv (Tan and Le 2019)."""

    def __init__(self, inputs: int, outputs: int, stride: int, window: int = 3, expansion: int = 4) -> None:
        super().__init__()
        inner = inputs * expansion
        self.net = nn.Sequential(
            nn.Conv2d(inputs, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.SiLU(inplace=True),
            nn.Conv2d(inner, inner, window, stride, window // 2, groups=inner, bias=False),
            nn.BatchNorm2d(inner),
            nn.SiLU(inplace=True),
            SqueezeExcite(inner, inputs // 4),
            nn.Conv2d(inner, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.skips = inputs == outputs and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(x) if self.skips else self.net(x)


def efficientnet() -> Made:
    """EfficientNet."""
    body = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.SiLU(inplace=True),
        InvertedBottleneck(16, 24, 2),
        InvertedBottleneck(24, 24, 1),
        InvertedBottleneck(24, 40, 2, 5),
        InvertedBottleneck(40, 40, 1, 5),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    return Classifier(body, nn.Linear(40, CLASSES)), labelled_images(128)


class DenseLayer(nn.Module):
    """Reads all that was made before it (Huang et al. 2017)."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.wide_norm = nn.BatchNorm2d(inputs)
        self.wide = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.narrow_norm = nn.BatchNorm2d(4 * growth)
        self.narrow = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, before: list[Tensor]) -> Tensor:
        x = torch.cat(before, 1)
        return self.narrow(F.relu(self.narrow_norm(self.wide(F.relu(self.wide_norm(x))))))


class DenseNet(nn.Module):
    """Two dense blocks with a transition between them."""

    def __init__(self, growth: int = 16, depth: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 7, 2, 3, bias=False)
        self.first = nn.ModuleList(DenseLayer(32 + growth * i, growth) for i in range(depth))
        width = 32 + growth * depth
        self.transition = nn.Sequential(
            nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2, 2)
        )
        self.second = nn.ModuleList(DenseLayer(width // 2 + growth * i, growth) for i in range(depth))
        self.head = nn.Linear(width // 2 + growth * depth, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        made = [F.max_pool2d(self.stem(images), 3, 2, 1)]
        for layer in self.first:
            made.append(layer(made))
        made = [self.transition(torch.cat(made, 1))]
        for layer in self.second:
            made.append(layer(made))
        return F.cross_entropy(self.head(torch.cat(made, 1).mean((2, 3))), labels)


def densenet() -> Made:
    """DenseNet."""
    return DenseNet(), labelled_images(128)


class InceptionBlock(nn.Module):
    """Four branches, joined: 1 x 1, 3 x 3, 1 x 7 after 7 x 1, and a mean (Szegedy et al. 2016)."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.single = ConvolutionUnit(inputs, 32, 1)
        self.square = nn.Sequential(ConvolutionUnit(inputs, 24, 1), ConvolutionUnit(24, 32, 3, 1, 1))
        self.crossed = nn.Sequential(
            ConvolutionUnit(inputs, 24, 1), ConvolutionUnit(24, 32, (1, 7), 1, (0, 3)), ConvolutionUnit(32, 32, (7, 1), 1, (3, 0))
        )
        self.pooled = nn.Sequential(nn.AvgPool2d(3, 1, 1), ConvolutionUnit(inputs, 32, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.single(x), self.square(x), self.crossed(x), self.pooled(x)], 1)


def inception() -> Made:
    """Inception."""
    body = nn.Sequential(
        ConvolutionUnit(3, 32, 3, 2),
        ConvolutionUnit(32, 64, 3, 1, 1),
        nn.MaxPool2d(3, 2),
        InceptionBlock(64),
        InceptionBlock(128),
        InceptionBlock(128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
    )
    return Classifier(body, nn.Linear(128, CLASSES)), labelled_images(112)


class MixerBlock(nn.Module):
    """An MLP over tokens and one over channels (Tolstikhin et al. 2021)."""

    def __init__(self, tokens: int, hidden: int) -> None:
        super().__init__()
        self.token_norm = nn.LayerNorm(hidden)
        self.channel_norm = nn.LayerNorm(hidden)
        self.token_mlp = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.channel_mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.token_mlp(self.token_norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel_mlp(self.channel_norm(x))


class SpatialGatingBlock(nn.Module):
    """An MLP whose half gates the other across tokens (Liu et al. 2021)."""

    def __init__(self, tokens: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.gate_norm = nn.LayerNorm(2 * hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(2 * hidden, hidden)
        self.across = nn.Conv1d(tokens, tokens, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept, gate = F.gelu(self.up(self.norm(x))).chunk(2, -1)
        return x + self.down(kept * self.across(self.gate_norm(gate)))


class PatchClassifier(nn.Module):
    """Patches, blocks over (tokens, channels), a mean, a head."""

    def __init__(self, block: Callable[[int, int], nn.Module], hidden: int = 128, tokens: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, 8, 8)
        self.blocks = nn.ModuleList(block(tokens, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)), labels)


def mixer() -> Made:
    """MLP-Mixer."""
    return PatchClassifier(MixerBlock), labelled_images(128)


def gmlp() -> Made:
    """gMLP."""
    return PatchClassifier(SpatialGatingBlock), labelled_images(128)


class VariationalAutoencoder(nn.Module):
    """Convolutions down to a normal distribution, and transposed ones up from a sample of it (Kingma and Welling 2014)."""

    def __init__(self, channels: int = 24, latent: int = 64, size: int = 24) -> None:
        super().__init__()
        inner = 2 * channels
        width = inner * size * size
        self.encoder = nn.Sequential(
            nn.Conv2d(3, channels, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(channels, inner, 4, 2, 1),
            nn.BatchNorm2d(inner),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
        )
        self.mean = nn.Linear(width, latent)
        self.log_variance = nn.Linear(width, latent)
        self.up = nn.Linear(latent, width)
        self.decoder = nn.Sequential(
            nn.Unflatten(1, (inner, size, size)),
            nn.ConvTranspose2d(inner, channels, 4, 2, 1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.ConvTranspose2d(channels, 3, 4, 2, 1),
            nn.Sigmoid(),
        )

    def forward(self, images: Tensor) -> Tensor:
        h = self.encoder(images)
        mean = self.mean(h)
        log_variance = self.log_variance(h)
        made = self.decoder(self.up(mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)))
        likeness = F.binary_cross_entropy(made, torch.sigmoid(images), reduction="mean")
        return likeness - 0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).mean()


def vae() -> Made:
    """Variational autoencoder."""
    return VariationalAutoencoder(), {"images": normal(2 * SAMPLES, 3, 96, 96)}


class TwoConvolutions3d(nn.Sequential):
    """Two convolutions of volumes, each with instance norm and leaky ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv3d(inputs, outputs, 3, padding=1),
            nn.InstanceNorm3d(outputs, affine=True),
            nn.LeakyReLU(),
            nn.Conv3d(outputs, outputs, 3, padding=1),
            nn.InstanceNorm3d(outputs, affine=True),
            nn.LeakyReLU(),
        )


class UNet3d(nn.Module):
    """A U-Net of three resolutions, with cross-entropy and Dice loss (Çiçek et al. 2016)."""

    def __init__(self, channels: int = 12, classes: int = 4) -> None:
        super().__init__()
        self.classes = classes
        self.down_1 = TwoConvolutions3d(1, channels)
        self.down_2 = TwoConvolutions3d(channels, 2 * channels)
        self.middle = TwoConvolutions3d(2 * channels, 4 * channels)
        self.widen_2 = nn.ConvTranspose3d(4 * channels, 2 * channels, 2, 2)
        self.up_2 = TwoConvolutions3d(4 * channels, 2 * channels)
        self.widen_1 = nn.ConvTranspose3d(2 * channels, channels, 2, 2)
        self.up_1 = TwoConvolutions3d(2 * channels, channels)
        self.output = nn.Conv3d(channels, classes, 1)

    def forward(self, volumes: Tensor, labels: Tensor) -> Tensor:
        first = self.down_1(volumes)
        second = self.down_2(F.max_pool3d(first, 2))
        x = self.middle(F.max_pool3d(second, 2))
        x = self.up_2(torch.cat([self.widen_2(x), second], 1))
        x = self.up_1(torch.cat([self.widen_1(x), first], 1))
        logits = self.output(x)
        found = logits.softmax(1)
        wanted = F.one_hot(labels, self.classes).permute(0, 4, 1, 2, 3).float()
        loss = F.cross_entropy(logits, labels)
        volume = (2, 3, 4)
        dice = 2 * (found * wanted).sum(volume) / (found.sum(volume) + wanted.sum(volume) + 1)
        return loss + 1 - dice.mean()


def unet3d() -> Made:
    """U-Net of volumes."""
    return UNet3d(), {"volumes": normal(SAMPLES, 1, 24, 24, 24), "labels": integers(4, SAMPLES, 24, 24, 24)}


def resized(x: Tensor, like: Tensor) -> Tensor:
    """`x` at the resolution of `like`."""
    return F.interpolate(x, size=like.shape[-2:], mode="bilinear", align_corners=False)


class DilatedPyramid(nn.Module):
    """Convolutions of several dilations and a mean of the whole image, joined (Chen et al. 2017)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(inputs, outputs, 1, bias=False)]
        convolutions += [nn.Conv2d(inputs, outputs, 3, padding=rate, dilation=rate, bias=False) for rate in (2, 4, 6)]
        self.branches = nn.ModuleList(nn.Sequential(one, nn.BatchNorm2d(outputs), nn.ReLU()) for one in convolutions)
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(inputs, outputs, 1), nn.ReLU())
        self.output = nn.Sequential(nn.Conv2d(5 * outputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        pooled = resized(self.pooled(x), x)
        return self.output(torch.cat([*(branch(x) for branch in self.branches), pooled], 1))


class DeepLab(nn.Module):
    """A dilated pyramid whose output joins an early layer's, for every pixel's class."""

    def __init__(self, classes: int = 6) -> None:
        super().__init__()
        self.stage_1 = ConvolutionUnit(3, 32, 3, 2, 1)
        self.stage_2 = ConvolutionUnit(32, 64, 3, 2, 1)
        self.stage_3 = nn.Sequential(nn.Conv2d(64, 96, 3, padding=2, dilation=2, bias=False), nn.BatchNorm2d(96), nn.ReLU())
        self.pyramid = DilatedPyramid(96, 48)
        self.early = ConvolutionUnit(32, 24, 1)
        self.output = nn.Sequential(ConvolutionUnit(72, 48, 3, 1, 1), nn.Conv2d(48, classes, 1))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        first = self.stage_1(images)
        x = resized(self.pyramid(self.stage_3(self.stage_2(first))), first)
        logits = resized(self.output(torch.cat([x, self.early(first)], 1)), images)
        return F.cross_entropy(logits, labels)


def deeplab() -> Made:
    """DeepLab."""
    return DeepLab(), {"images": normal(SAMPLES, 3, 96, 96), "labels": integers(6, SAMPLES, 96, 96)}


class RadianceField(nn.Module):
    """Colours along rays, by density and direction, added up (Mildenhall et al. 2020)."""

    def __init__(self, hidden: int = 128, points: int = 64) -> None:
        super().__init__()
        self.points = points
        self.body = nn.Sequential(
            nn.Linear(63, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
        )
        self.density = nn.Linear(hidden, 1)
        self.colour = nn.Sequential(nn.Linear(hidden + 27, hidden // 2), nn.ReLU(), nn.Linear(hidden // 2, 3), nn.Sigmoid())

    @staticmethod
    def encoded(x: Tensor, octaves: int) -> Tensor:
        """Coordinates with sines and cosines of them."""
        frequencies = 2.0 ** torch.arange(octaves)
        scaled = (x[..., None, :] * frequencies[:, None]).flatten(-2)
        return torch.cat([x, scaled.sin(), scaled.cos()], -1)

    def forward(self, origins: Tensor, directions: Tensor, colours: Tensor) -> Tensor:
        depths = torch.linspace(2.0, 6.0, self.points)
        places = origins[:, None] + directions[:, None] * depths[:, None]
        h = self.body(self.encoded(places, 10))
        density = F.relu(self.density(h)[..., 0])
        views = self.encoded(F.normalize(directions, dim=-1), 4)[:, None].expand(-1, self.points, -1)
        colour = self.colour(torch.cat([h, views], -1))
        apart = torch.cat([depths[1:] - depths[:-1], torch.full((1,), 1e3)])
        opacity = 1 - torch.exp(-density * apart)
        passed = torch.cumprod(torch.cat([torch.ones_like(opacity[:, :1]), 1 - opacity + 1e-10], -1), -1)[:, :-1]
        weights = opacity * passed
        loss = F.mse_loss((weights[..., None] * colour).sum(1), colours)
        return loss + 0.01 * (weights.cumsum(-1) - 0.5).abs().mean()


def nerf() -> Made:
    """Neural radiance field."""
    return RadianceField(), {"origins": normal(256, 3), "directions": normal(256, 3, seed=1), "colours": torch.rand(256, 3)}


class PointNet(nn.Module):
    """Points turned by a learned matrix, a maximum over them, a head (Qi et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.turn_points = nn.Sequential(
            nn.Conv1d(3, 64, 1), nn.BatchNorm1d(64), nn.ReLU(), nn.Conv1d(64, 128, 1), nn.BatchNorm1d(128), nn.ReLU()
        )
        self.turn = nn.Linear(128, 9)
        self.first = nn.Sequential(nn.Conv1d(3, 64, 1), nn.BatchNorm1d(64), nn.ReLU())
        self.second = nn.Sequential(nn.Conv1d(64, 128, 1), nn.BatchNorm1d(128), nn.ReLU(), nn.Conv1d(128, 256, 1), nn.BatchNorm1d(256))
        self.head = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, CLASSES))

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        matrix = self.turn(self.turn_points(points).max(-1).values).view(-1, 3, 3) + torch.eye(3)
        h = self.second(self.first(torch.bmm(matrix, points))).max(-1).values
        skew = torch.linalg.matrix_norm(torch.bmm(matrix, matrix.transpose(1, 2)) - torch.eye(3)).mean()
        return F.cross_entropy(self.head(h), labels) + 0.001 * skew


def pointnet() -> Made:
    """PointNet."""
    return PointNet(), {"points": normal(16, 3, 1024), "labels": integers(CLASSES, 16)}


class Detector(nn.Module):
    """A transformer from an image's places to classes and boxes of learned queries (Carion et al. 2020), without the matching."""

    def __init__(self, hidden: int = 96, queries: int = 50) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            ConvolutionUnit(3, 32, 3, 2, 1), ConvolutionUnit(32, 64, 3, 2, 1), ConvolutionUnit(64, hidden, 3, 2, 1)
        )
        self.transformer = nn.Transformer(hidden, 4, 2, 2, 256, dropout=0.0, batch_first=True)
        self.queries = nn.Parameter(torch.randn(queries, hidden))
        self.rows = nn.Parameter(torch.rand(16, hidden // 2))
        self.columns = nn.Parameter(torch.rand(16, hidden // 2))
        self.classes = nn.Linear(hidden, CLASSES + 1)
        self.boxes = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 4))

    def forward(self, images: Tensor, labels: Tensor, boxes: Tensor) -> Tensor:
        h = self.backbone(images)
        height, width = h.shape[-2:]
        across = self.columns[:width].unsqueeze(0).repeat(height, 1, 1)
        down = self.rows[:height].unsqueeze(1).repeat(1, width, 1)
        places = torch.cat([across, down], -1).flatten(0, 1)
        tokens = h.flatten(2).transpose(1, 2) + places
        h = self.transformer(tokens, self.queries.unsqueeze(0).expand(images.shape[0], -1, -1))
        found = self.boxes(h).sigmoid()
        loss = F.cross_entropy(self.classes(h).transpose(1, 2), labels)
        return loss + F.l1_loss(found, boxes) + torch.cdist(found, boxes).mean() * 0.1


def detr() -> Made:
    """Detection transformer."""
    labels = integers(CLASSES + 1, SAMPLES, 50)
    return Detector(), {"images": normal(SAMPLES, 3, 128, 128), "labels": labels, "boxes": torch.rand(SAMPLES, 50, 4)}


FACTORIES = (swin, convnext, efficientnet, densenet, inception, mixer, gmlp, vae, unet3d, deeplab, nerf, pointnet, detr)
