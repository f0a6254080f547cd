package kproxy.tools;

import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Random;
import org.apache.kafka.common.compress.Compression;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.internals.RecordHeader;
import org.apache.kafka.common.record.TimestampType;
import org.apache.kafka.common.record.internal.CompressionType;
import org.apache.kafka.common.record.internal.MemoryRecords;
import org.apache.kafka.common.record.internal.MemoryRecordsBuilder;
import org.apache.kafka.common.utils.internals.ByteBufferOutputStream;

/** Record batches and message sets as the official builder writes them, and random contents for them. */
final class Batches {
    static final long T0 = 1_700_000_000_000L; // all timestamps are after this: November 2023
    static final Header[] NO_HEADERS = {};
    private static final String[] WORDS =
        {"kafka", "order", "user", "{\"id\":", "}", "payment", "σήμα", "clic", "0000", "event-", "日本", "ok"};

    private Batches() { }

    static final class Entry {
        long offset;
        long timestamp;
        byte[] key;
        byte[] value;
        Header[] headers = NO_HEADERS;

        Entry(long offset, long timestamp, byte[] key, byte[] value) {
            this.offset = offset;
            this.timestamp = timestamp;
            this.key = key;
            this.value = value;
        }
    }

    /** What a batch is to be. */
    static final class Draft {
        final byte magic;
        final CompressionType codec;
        TimestampType timestampType;
        long baseOffset;
        long logAppendTime = -1;
        long producerId = -1;
        short producerEpoch = -1;
        int sequence = -1;
        int leaderEpoch = -1;
        long deleteHorizon = -1;
        boolean transactional;
        List<Entry> entries = new ArrayList<>();

        Draft(int magic, CompressionType codec) {
            this.magic = (byte) magic;
            this.codec = codec;
            this.timestampType = magic == 0 ? TimestampType.NO_TIMESTAMP_TYPE : TimestampType.CREATE_TIME;
        }

        void stampAtAppend(long time) {
            timestampType = TimestampType.LOG_APPEND_TIME;
            logAppendTime = time;
        }

        void by(long producerId, int producerEpoch, int sequence, boolean transactional) {
            this.producerId = producerId;
            this.producerEpoch = (short) producerEpoch;
            this.sequence = sequence;
            this.transactional = transactional;
        }

        byte[] build() {
            var builder = new MemoryRecordsBuilder(new ByteBufferOutputStream(4096), magic, Compression.of(codec).build(),
                timestampType, baseOffset, logAppendTime, producerId, producerEpoch, sequence, transactional, false,
                leaderEpoch, Integer.MAX_VALUE, deleteHorizon);
            for (Entry entry : entries) {
                if (magic == 2) builder.appendWithOffset(entry.offset, entry.timestamp, entry.key, entry.value, entry.headers);
                else builder.appendWithOffset(entry.offset, magic == 0 ? -1 : entry.timestamp, entry.key, entry.value);
            }
            return bytes(builder.build());
        }
    }

    static byte[] bytes(MemoryRecords records) {
        ByteBuffer buffer = records.buffer().duplicate();
        byte[] bytes = new byte[buffer.remaining()];
        buffer.get(bytes);
        return bytes;
    }

    static byte[] joined(byte[]... parts) {
        var buffer = ByteBuffer.allocate(Arrays.stream(parts).mapToInt(part -> part.length).sum());
        for (byte[] part : parts) buffer.put(part);
        return buffer.array();
    }

    static byte[] noise(Random random, int size) {
        byte[] bytes = new byte[size];
        random.nextBytes(bytes);
        return bytes;
    }

    static byte[] words(Random random, int count) {
        var text = new StringBuilder();
        for (int i = 0; i < count; i++) text.append(WORDS[random.nextInt(WORDS.length)]);
        return text.toString().getBytes(StandardCharsets.UTF_8);
    }

    /** Keys that are empty, repeated or not ASCII, values that are null or empty. */
    static Header[] headers(Random random, int count) {
        Header[] headers = new Header[count];
        for (int i = 0; i < count; i++) {
            String key = switch (random.nextInt(6)) {
                case 0 -> "";
                case 1 -> "ключ";
                case 2 -> "dup";
                default -> "h" + i;
            };
            byte[] value = random.nextInt(4) == 0 ? null
                : random.nextInt(5) == 0 ? new byte[0] : noise(random, 1 + random.nextInt(12));
            headers[i] = new RecordHeader(key, value);
        }
        return headers;
    }

    /** One to three small records in a batch of any kind that the magic allows. */
    static byte[] small(Random random, byte magic, CompressionType codec) {
        var draft = new Draft(magic, codec);
        draft.baseOffset = random.nextInt(3) == 0 ? 0 : random.nextInt(1_000_000);
        if (magic == 2 && random.nextInt(3) == 0)
            draft.by(random.nextInt(100_000), random.nextInt(50), random.nextInt(1000), random.nextBoolean());
        if (magic >= 1 && random.nextInt(5) == 0) draft.stampAtAppend(T0 + random.nextInt(1_000_000));
        if (magic == 2 && random.nextBoolean()) draft.leaderEpoch = random.nextInt(20);
        int count = 1 + random.nextInt(3);
        long timestamp = T0 + random.nextInt(1_000_000_000);
        for (int i = 0; i < count; i++) {
            byte[] key = random.nextInt(3) == 0 ? null : noise(random, random.nextInt(6));
            byte[] value = random.nextInt(6) == 0 ? null : words(random, random.nextInt(6));
            var entry = new Entry(draft.baseOffset + i, timestamp + random.nextInt(2000) - 500, key, value);
            if (magic == 2 && random.nextInt(3) == 0) entry.headers = headers(random, 1 + random.nextInt(2));
            draft.entries.add(entry);
        }
        return draft.build();
    }

    /** Records that follow each other closely, each with key and value. */
    static List<Entry> entries(Random random, long baseOffset, int count) {
        List<Entry> entries = new ArrayList<>();
        long timestamp = T0 + random.nextInt(1_000_000_000);
        for (int i = 0; i < count; i++) {
            timestamp += random.nextInt(50);
            byte[] key = noise(random, 1 + random.nextInt(10));
            entries.add(new Entry(baseOffset + i, timestamp, key, words(random, 1 + random.nextInt(12))));
        }
        return entries;
    }

    /** A generator of its own for everything that has a name, so that adding one thing changes no other. */
    static Random randomFor(long start, String name) {
        long hash = start;
        for (char letter : name.toCharArray()) hash = 31 * hash + letter;
        hash ^= hash >>> 31;
        hash *= 0x9E3779B97F4A7C15L;
        hash ^= hash >>> 29;
        return new Random(hash);
    }
}
