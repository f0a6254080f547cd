package kproxy.tools;

import static kproxy.tools.Official.require;

import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Collection;
import java.util.List;
import java.util.Random;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.common.errors.UnsupportedVersionException;
import org.apache.kafka.common.protocol.Message;
import org.apache.kafka.common.record.internal.CompressionType;
import org.apache.kafka.common.record.internal.MemoryRecords;

/** Fills messages of any layout: with everything set, with as little as can be, or at random with a liking for edges. */
final class RandomMessages {
    enum Filling { FULL, BARE, RANDOM }

    private static final String[] NAMES = {"topic-a", "orders", "my.topic_1", "group-1", "localhost", "range", "consumer",
        "__consumer_offsets", "rack-1", "PLAINTEXT"};
    private static final String[] BEYOND_ASCII = {"é", "ß", "я", "日本語", "😀", "𝄞", "\u00a0", "\ufeff", "ｱ", "אב", "\u200d",
        "\uffff", "\u0800"};
    private static final String[] TO_ESCAPE = {"\"", "\\", "\n", "\t", "\r", "\u0000", "\u0001", "\u007f", "\u2028", "/", "<>&"};
    private static final int FIELDS = 70; // about as many in one message, lest nested arrays explode

    final Random random;
    private final Filling filling;
    private final String api;
    private final short version;
    private int fieldsLeft;

    RandomMessages(long seed, String api, String side, short version, int index) {
        this.random = Batches.randomFor(1125899906842597L, seed + "|" + api + "|" + side + "|" + version + "|" + index);
        this.filling = Filling.values()[Math.min(index, 2)];
        this.api = api;
        this.version = version;
    }

    /** Some combinations of values a version cannot say: then the next one. */
    Message next(Layout layout) throws ReflectiveOperationException {
        for (int attempt = 0; ; attempt++) {
            fieldsLeft = FIELDS;
            var message = (Message) struct(layout, 0);
            try {
                Official.write(message, version);
                return message;
            } catch (UnsupportedVersionException e) {
                if (attempt == 1000) throw e;
            }
        }
    }

    private boolean oneIn(int n) {
        return random.nextInt(n) == 0;
    }

    private Object struct(Layout layout, int depth) throws ReflectiveOperationException {
        Object struct = layout.type.getConstructor().newInstance();
        for (Layout.Member member : layout.plain) set(struct, member, value(member, depth));
        for (Layout.Member member : layout.tagged)
            if (filling == Filling.FULL || filling == Filling.RANDOM && random.nextInt(10) < 6)
                set(struct, member, value(member, depth));
        return struct;
    }

    private static void set(Object struct, Layout.Member member, Object value) throws ReflectiveOperationException {
        String setter = "set" + Character.toUpperCase(member.name.charAt(0)) + member.name.substring(1);
        struct.getClass().getMethod(setter, member.access.getType()).invoke(struct, value);
    }

    private boolean leftNull(Layout.Member member) {
        if (!member.nullable) return false;
        return switch (filling) {
            case FULL -> false;
            case BARE -> member.struct == null || random.nextBoolean(); // some stay, to show the nulls inside them
            case RANDOM -> random.nextInt(10) < 3;
        };
    }

    private Object value(Layout.Member member, int depth) throws ReflectiveOperationException {
        if (leftNull(member)) return null;
        if (!member.array) return member.struct != null ? struct(member.struct, depth + 1) : scalar(member);
        int count = count(member, depth);
        Collection<Object> elements = Layout.newCollection(member);
        for (int i = 0; i < count; i++) {
            elements.add(member.struct != null ? struct(member.struct, depth + 1) : scalar(member));
            fieldsLeft -= member.struct != null ? member.struct.plain.size() : 1;
        }
        require(elements.size() == count, member.name + ": the collection took two elements for one");
        return elements;
    }

    private int count(Layout.Member member, int depth) {
        switch (filling) {
            case FULL:
                return depth == 0 ? 2 : 1;
            case BARE:
                return member.struct == null || oneIn(4) ? 0 : 1;
            default:
                if (fieldsLeft <= 0) return oneIn(4) ? 1 : 0;
                if (depth == 0) return random.nextInt(4);
                if (depth == 1) return oneIn(3) ? random.nextInt(4) : 1;
                return random.nextInt(3);
        }
    }

    private Object scalar(Layout.Member member) {
        return switch (member.type) {
            case "bool" -> filling != Filling.BARE && (filling == Filling.FULL || random.nextBoolean());
            case "int8" -> (byte) integer(Byte.MIN_VALUE, Byte.MAX_VALUE);
            case "int16" -> (short) integer(Short.MIN_VALUE, Short.MAX_VALUE);
            case "uint16" -> (int) integer(0, 0xFFFF);
            case "int32" -> (int) integer(Integer.MIN_VALUE, Integer.MAX_VALUE);
            case "uint32" -> integer(0, 0xFFFFFFFFL);
            case "int64" -> integer(Long.MIN_VALUE, Long.MAX_VALUE);
            case "float64" -> float64();
            case "uuid" -> uuid();
            case "string" -> string();
            case "bytes" -> Layout.bytesFor(member, bytes());
            case "records" -> MemoryRecords.readableRecords(ByteBuffer.wrap(records()));
            default -> throw new IllegalStateException(member.type);
        };
    }

    private long integer(long lowest, long highest) {
        if (filling == Filling.BARE) return 0;
        if (filling == Filling.FULL) return 1 + random.nextInt(100);
        switch (random.nextInt(10)) {
            case 0:
                return lowest;
            case 1:
                return highest;
            case 2:
                return lowest < 0 ? -1 : 0;
            case 3: case 4: case 5:
                return random.nextInt(10);
            default:
                long any = random.nextLong();
                return lowest == Long.MIN_VALUE ? any : lowest + Math.floorMod(any, highest - lowest + 1);
        }
    }

    private double float64() {
        if (filling == Filling.BARE) return 0.0;
        double[] some = {0.0, -0.0, 1.5, -2.25, Double.MIN_VALUE, Double.MAX_VALUE, 1e-7, random.nextGaussian(),
            random.nextGaussian() * 1e12};
        return filling == Filling.FULL ? 1048576.5 : some[random.nextInt(some.length)];
    }

    private Uuid uuid() {
        if (filling == Filling.BARE || filling == Filling.RANDOM && oneIn(8)) return Uuid.ZERO_UUID;
        if (filling == Filling.RANDOM && oneIn(12)) return Uuid.ONE_UUID;
        return new Uuid(random.nextLong(), random.nextLong());
    }

    private byte[] bytes() {
        if (filling == Filling.BARE) return new byte[0];
        if (filling == Filling.FULL) return Batches.noise(random, 1 + random.nextInt(8));
        int kind = random.nextInt(20);
        if (kind < 3) return new byte[0];
        if (kind == 3) return Batches.noise(random, 126 + random.nextInt(4)); // where its varint takes a second byte
        return Batches.noise(random, 1 + random.nextInt(16));
    }

    private String string() {
        if (filling == Filling.BARE) return "";
        if (filling == Filling.FULL) return NAMES[random.nextInt(NAMES.length)];
        int kind = random.nextInt(40);
        if (kind < 5) return "";
        if (kind < 10) return pieces(BEYOND_ASCII, 1 + random.nextInt(4), "");
        if (kind < 12) return pieces(TO_ESCAPE, 1 + random.nextInt(3), "x");
        if (kind == 12) return alphabet('a', 125 + random.nextInt(5));
        if (kind == 13 && fieldsLeft > 30) return alphabet('A', 200 + random.nextInt(200));
        if (kind < 28) return NAMES[random.nextInt(NAMES.length)];
        var letters = new StringBuilder();
        for (int left = 1 + random.nextInt(10); left > 0; left--) letters.append((char) ('a' + random.nextInt(26)));
        return letters.toString();
    }

    private String pieces(String[] from, int count, String after) {
        var text = new StringBuilder();
        for (int i = 0; i < count; i++) text.append(from[random.nextInt(from.length)]).append(after);
        return text.toString();
    }

    private static String alphabet(char first, int length) {
        var text = new StringBuilder();
        for (int i = 0; i < length; i++) text.append((char) (first + i % 26));
        return text.toString();
    }

    /** Records of the magic and codecs that clients of this version send. */
    private byte[] records() {
        if (filling == Filling.BARE || filling == Filling.RANDOM && oneIn(10)) return new byte[0];
        byte[] magics = magics();
        byte magic = magics[random.nextInt(magics.length)];
        var codecs = new ArrayList<>(List.of(CompressionType.NONE, CompressionType.GZIP, CompressionType.SNAPPY, CompressionType.LZ4));
        boolean takesZstd = switch (api) {
            case "Produce" -> version >= 7;
            case "Fetch" -> version >= 10;
            default -> true;
        };
        if (takesZstd && magic == 2) codecs.add(CompressionType.ZSTD);
        var codec = codecs.get(random.nextInt(codecs.size()));
        byte[] records = Batches.small(random, magic, codec);
        if (filling == Filling.RANDOM && !api.equals("Produce") && oneIn(4))
            records = Batches.joined(records, Batches.small(random, magic, codec));
        if (!api.equals("FetchSnapshot")) return records;
        int from = random.nextInt(records.length); // a snapshot is fetched in slices that heed no batch
        return java.util.Arrays.copyOfRange(records, from, from + random.nextInt(records.length - from + 1));
    }

    private byte[] magics() {
        return switch (api) {
            case "Produce" -> new byte[] {(byte) Math.min(2, Math.max(0, version - 1))};
            case "Fetch" -> version <= 1 ? new byte[] {0} : version <= 3 ? new byte[] {1, 1, 0} : new byte[] {2, 2, 2, 1, 0};
            default -> new byte[] {2};
        };
    }
}
