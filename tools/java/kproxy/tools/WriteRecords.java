package kproxy.tools;

import static kproxy.tools.Official.JSON;
import static kproxy.tools.Official.require;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.IOException;
import java.io.PrintStream;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Base64;
import java.util.HexFormat;
import java.util.List;
import java.util.Locale;
import java.util.Random;
import java.util.function.BiConsumer;
import kproxy.tools.Batches.Draft;
import kproxy.tools.Batches.Entry;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.internals.RecordHeader;
import org.apache.kafka.common.message.KRaftVersionRecord;
import org.apache.kafka.common.message.LeaderChangeMessage;
import org.apache.kafka.common.message.SnapshotFooterRecord;
import org.apache.kafka.common.message.SnapshotHeaderRecord;
import org.apache.kafka.common.message.VotersRecord;
import org.apache.kafka.common.record.TimestampType;
import org.apache.kafka.common.record.internal.CompressionType;
import org.apache.kafka.common.record.internal.ControlRecordType;
import org.apache.kafka.common.record.internal.DefaultRecordBatch;
import org.apache.kafka.common.record.internal.EndTransactionMarker;
import org.apache.kafka.common.record.internal.MemoryRecords;
import org.apache.kafka.common.record.internal.Record;
import org.apache.kafka.common.record.internal.RecordBatch;

/**
 * Fragments of logs, a JSON object a line: the bytes as hex, and the batches and records in them as the official library reads
 * them. Arguments: the seed, the file to write.
 */
public final class WriteRecords {
    private static final int HEADER_BYTES = 61;

    private final long seed;
    private final PrintStream out;

    private WriteRecords(long seed, PrintStream out) {
        this.seed = seed;
        this.out = out;
    }

    public static void main(String[] args) throws Exception {
        try (var out = new PrintStream(args[1], "UTF-8")) {
            var records = new WriteRecords(Long.parseLong(args[0]), out);
            for (int magic = 0; magic <= 2; magic++)
                for (CompressionType codec : CompressionType.values())
                    if (magic == 2 || codec != CompressionType.ZSTD) records.ofOneKind(magic, codec);
            records.control();
            records.mixed();
            require(!out.checkError(), "writing failed");
        }
    }

    private Random random(String name) {
        return Batches.randomFor(7, seed + "|records|" + name);
    }

    // -------------------------------------------------------------------------------------------- one magic, one codec

    private void ofOneKind(int magic, CompressionType codec) throws IOException {
        ofAnyMagic(magic, codec);
        if (magic >= 1) withTimestamps(magic, codec);
        if (magic == 2) withProducers(codec);
        severalOrDamaged(magic, codec);
    }

    /** One batch of `count` records after `change` was made to it; what is read must be what went in. */
    private void one(int magic, CompressionType codec, String variant, int count, BiConsumer<Draft, Random> change)
            throws IOException {
        one(magic, codec, variant, (draft, random) -> {
            draft.entries = Batches.entries(random, draft.baseOffset, count);
            change.accept(draft, random);
        });
    }

    private void one(int magic, CompressionType codec, String variant, BiConsumer<Draft, Random> fill) throws IOException {
        String name = "m" + magic + "-" + codec.name + "-" + variant;
        var draft = new Draft(magic, codec);
        fill.accept(draft, random(name));
        checkAgainst(draft, emit(name, magic, codec.name, draft.build(), null), name);
    }

    private void ofAnyMagic(int magic, CompressionType codec) throws IOException {
        one(magic, codec, "single", 1, (draft, random) -> { });
        one(magic, codec, "twenty", 20, (draft, random) -> { });
        one(magic, codec, "null-key", 3, (draft, random) -> draft.entries.get(1).key = null);
        one(magic, codec, "tombstone", 3, (draft, random) -> draft.entries.get(0).value = null);
        one(magic, codec, "null-both", 2, (draft, random) -> draft.entries.get(1).key = draft.entries.get(1).value = null);
        one(magic, codec, "empty-key-and-value", 3, (draft, random) -> {
            draft.entries.get(0).value = new byte[0];
            draft.entries.get(1).key = new byte[0];
            draft.entries.get(2).key = draft.entries.get(2).value = new byte[0];
        });
        one(magic, codec, "base-offset", (draft, random) -> {
            draft.baseOffset = 1_234_567_890_123L + random.nextInt(1000);
            draft.entries = Batches.entries(random, draft.baseOffset, 4);
        });
        one(magic, codec, "offset-gaps", (draft, random) -> {
            draft.baseOffset = 500 + random.nextInt(100);
            draft.entries = Batches.entries(random, draft.baseOffset, 5);
            long offset = draft.baseOffset;
            for (Entry entry : draft.entries) {
                entry.offset = offset;
                offset += 1 + random.nextInt(300);
            }
        });
        one(magic, codec, "big", 3, (draft, random) -> draft.entries.forEach(entry -> entry.value = Batches.words(random, 9000)));
    }

    private void withTimestamps(int magic, CompressionType codec) throws IOException {
        one(magic, codec, "timestamps-disorder", 6, (draft, random) ->
            draft.entries.forEach(entry -> entry.timestamp += random.nextInt(100_000) - 50_000));
        one(magic, codec, "no-timestamp", 2, (draft, random) -> draft.entries.forEach(entry -> entry.timestamp = -1));
        one(magic, codec, "log-append-time", (draft, random) -> {
            draft.stampAtAppend(Batches.T0 + 5_000_000_000L + random.nextInt(1000));
            draft.entries = Batches.entries(random, draft.baseOffset, 4);
        });
    }

    private void withProducers(CompressionType codec) throws IOException {
        one(2, codec, "headers", 5, (draft, random) -> {
            var entries = draft.entries;
            entries.get(0).headers = headers("k", new byte[] {1, 2, 3});
            entries.get(1).headers = headers("null", null, "empty", new byte[0]);
            entries.get(2).headers = headers("dup", Batches.noise(random, 4), "dup", Batches.noise(random, 4),
                "", Batches.noise(random, 2), "ключ-😀", null);
            entries.get(3).headers = Batches.headers(random, 70);
            entries.get(4).headers = headers("long", Batches.noise(random, 130));
        });
        one(2, codec, "transactional", (draft, random) -> {
            draft.by(1000 + random.nextInt(100_000), random.nextInt(100), random.nextInt(100_000), true);
            draft.entries = Batches.entries(random, 0, 3);
        });
        one(2, codec, "idempotent", (draft, random) -> {
            draft.by((1L << 40) + random.nextInt(100_000), 0, 0, false);
            draft.entries = Batches.entries(random, 0, 3);
        });
        one(2, codec, "sequence-wrap", 5, (draft, random) -> draft.by(77, Short.MAX_VALUE, Integer.MAX_VALUE - 1, false));
        one(2, codec, "leader-epoch", (draft, random) -> {
            draft.leaderEpoch = 1 + random.nextInt(1000);
            draft.entries = Batches.entries(random, 0, 2);
        });
        one(2, codec, "delete-horizon", 3, (draft, random) -> {
            draft.deleteHorizon = Batches.T0 + 86_400_000L;
            draft.entries.get(1).value = null;
        });
        one(2, codec, "log-append-time-headers-txn", (draft, random) -> {
            draft.stampAtAppend(Batches.T0 + 9_000_000_000L);
            draft.by(5, 1, 10, true);
            draft.leaderEpoch = 3;
            draft.baseOffset = 42;
            draft.entries = Batches.entries(random, 42, 3);
            draft.entries.get(2).headers = Batches.headers(random, 2);
        });
    }

    private static Header[] headers(Object... keysAndValues) {
        Header[] headers = new Header[keysAndValues.length / 2];
        for (int i = 0; i < headers.length; i++)
            headers[i] = new RecordHeader((String) keysAndValues[2 * i], (byte[]) keysAndValues[2 * i + 1]);
        return headers;
    }

    private void severalOrDamaged(int magic, CompressionType codec) throws IOException {
        String prefix = "m" + magic + "-" + codec.name + "-";
        Random random = random(prefix + "multi");
        byte[] first = batch(random, magic, codec, 10, 3);
        byte[] second = batch(random, magic, codec, 13, 2);
        byte[] last = batch(random, magic, codec, 100, 1);
        var kind = new Kind(prefix, magic, codec.name);
        kind.emit("three-batches", null, first, second, last);

        int cutBody = last.length - 1 - random.nextInt(last.length / 3);
        kind.emit("truncated-tail", "last batch cut in its body", first, Arrays.copyOf(last, cutBody));
        int cutHeader = 14 + random.nextInt(3);
        kind.emit("truncated-tail-header", "last batch cut in its header, after the length field", first, Arrays.copyOf(last, cutHeader));
        int cutPrefix = 1 + random.nextInt(11);
        kind.emit("truncated-tail-tiny", "fewer than 12 bytes of the last batch", first, Arrays.copyOf(last, cutPrefix));
        kind.emit("truncated-only", "the only batch is cut: no complete batch", Arrays.copyOf(last, last.length - 3));

        byte[] wrongCrc = last.clone();
        wrongCrc[(magic == 2 ? 17 : 12) + random.nextInt(4)] ^= (byte) (1 + random.nextInt(255));
        kind.emit("corrupt-crc", "checksum field altered", wrongCrc);
        kind.emit("corrupt-crc-second", "checksum field of the last batch altered", first, wrongCrc);
        if (codec == CompressionType.NONE) {
            byte[] wrongValue = last.clone();
            wrongValue[last.length - (magic == 2 ? 2 : 1)] ^= 0x20; // in a batch v2 a count of headers follows the value
            kind.emit("corrupt-payload", "one bit of the last value altered", wrongValue);
        }
        if (magic == 2) {
            byte[] otherEpoch = last.clone();
            ByteBuffer.wrap(otherEpoch).putInt(12, 4242);
            kind.emit("leader-epoch-overwritten", "leader epoch changed after the fact: checksum still valid", otherEpoch);
            byte[] otherOffset = last.clone();
            ByteBuffer.wrap(otherOffset).putLong(0, 987654321L);
            kind.emit("base-offset-overwritten", "base offset changed after the fact: checksum still valid", otherOffset);
        }
    }

    private static byte[] batch(Random random, int magic, CompressionType codec, long baseOffset, int count) {
        var draft = new Draft(magic, codec);
        draft.baseOffset = baseOffset;
        draft.entries = Batches.entries(random, baseOffset, count);
        return draft.build();
    }

    private final class Kind {
        private final String prefix;
        private final int magic;
        private final String codec;

        private Kind(String prefix, int magic, String codec) {
            this.prefix = prefix;
            this.magic = magic;
            this.codec = codec;
        }

        private void emit(String variant, String note, byte[]... parts) throws IOException {
            WriteRecords.this.emit(prefix + variant, magic, codec, Batches.joined(parts), note);
        }
    }

    // ------------------------------------------------------------------------------------------------ control and mixed

    private Random special; // shared by what follows, in this order

    private void control() throws IOException {
        special = random("special");
        var kind = new Kind("m2-control-", 2, "none");
        for (var type : new ControlRecordType[] {ControlRecordType.COMMIT, ControlRecordType.ABORT})
            kind.emit(type.name().toLowerCase(Locale.ROOT), null, Batches.bytes(MemoryRecords.withEndTransactionMarker(
                100 + special.nextInt(100), Batches.T0 + special.nextInt(1_000_000), 5, 4711 + special.nextInt(100),
                (short) special.nextInt(20), new EndTransactionMarker(type, special.nextInt(50)))));
        var voters = List.of(new LeaderChangeMessage.Voter().setVoterId(1), new LeaderChangeMessage.Voter().setVoterId(3));
        var leaderChange = new LeaderChangeMessage().setVersion((short) 0).setLeaderId(3).setVoters(voters)
            .setGrantingVoters(List.of(new LeaderChangeMessage.Voter().setVoterId(3)));
        kind.emit("leader-change", null, Batches.bytes(
            MemoryRecords.withLeaderChangeMessage(7, Batches.T0, 2, ByteBuffer.allocate(512), leaderChange)));
        var snapshotHeader = new SnapshotHeaderRecord().setVersion((short) 0)
            .setLastContainedLogTimestamp(Batches.T0 - special.nextInt(1000));
        kind.emit("snapshot-header", null, Batches.bytes(
            MemoryRecords.withSnapshotHeaderRecord(0, Batches.T0, 1, ByteBuffer.allocate(512), snapshotHeader)));
        kind.emit("snapshot-footer", null, Batches.bytes(MemoryRecords.withSnapshotFooterRecord(
            9, Batches.T0, 1, ByteBuffer.allocate(512), new SnapshotFooterRecord().setVersion((short) 0))));
        kind.emit("kraft-version", null, Batches.bytes(MemoryRecords.withKRaftVersionRecord(
            0, Batches.T0, 1, ByteBuffer.allocate(512), new KRaftVersionRecord().setVersion((short) 0).setKRaftVersion((short) 1))));
        var voter = new VotersRecord.Voter().setVoterId(1)
            .setVoterDirectoryId(new Uuid(special.nextLong(), special.nextLong()))
            .setKRaftVersionFeature(new VotersRecord.KRaftVersionFeature().setMaxSupportedVersion((short) 1));
        kind.emit("kraft-voters", null, Batches.bytes(MemoryRecords.withVotersRecord(1, Batches.T0, 1,
            ByteBuffer.allocate(1024), new VotersRecord().setVersion((short) 0).setVoters(new ArrayList<>(List.of(voter))))));
    }

    private void mixed() throws IOException {
        var empty = ByteBuffer.allocate(HEADER_BYTES);
        DefaultRecordBatch.writeEmptyHeader(empty, (byte) 2, 4000 + special.nextInt(10), (short) 3, 17, 1000, 1009, 6,
            TimestampType.CREATE_TIME, Batches.T0, true, false);
        emit("m2-none-empty-batch", 2, "none", empty.array(), "all records compacted away: zero records, last offset kept");

        emit("mixed-magic", null, "mixed", Batches.joined(
            batch(special, 0, CompressionType.NONE, 0, 2), batch(special, 1, CompressionType.GZIP, 2, 3),
            batch(special, 2, CompressionType.LZ4, 5, 2), batch(special, 2, CompressionType.NONE, 7, 1)), null);

        emit("m2-transaction-log", 2, "mixed", Batches.joined(
            ofTransaction(CompressionType.NONE, 0, 0), marker(2, ControlRecordType.ABORT),
            ofTransaction(CompressionType.SNAPPY, 3, 2), marker(5, ControlRecordType.COMMIT)), null);
        emit("empty", null, "none", new byte[0], "no bytes at all");
    }

    private byte[] ofTransaction(CompressionType codec, long baseOffset, int sequence) {
        var draft = new Draft(2, codec);
        draft.baseOffset = baseOffset;
        draft.by(900, 2, sequence, true);
        draft.entries = Batches.entries(special, baseOffset, 2);
        return draft.build();
    }

    private static byte[] marker(long offset, ControlRecordType type) {
        return Batches.bytes(MemoryRecords.withEndTransactionMarker(offset, Batches.T0, 1, 900, (short) 2, new EndTransactionMarker(type, 0)));
    }

    // ---------------------------------------------------------------------------------------------------- the fragments

    private ObjectNode emit(String name, Integer magic, String codec, byte[] bytes, String note) throws IOException {
        ObjectNode line = JSON.createObjectNode();
        line.put("name", name).put("magic", magic).put("codec", codec);
        if (note != null) line.put("note", note);
        line.put("hex", HexFormat.of().formatHex(bytes));
        ArrayNode batches = line.putArray("batches");
        int used = 0;
        for (RecordBatch batch : MemoryRecords.readableRecords(ByteBuffer.wrap(bytes)).batches()) {
            used += batch.sizeInBytes();
            describe(batch, batches.addObject());
        }
        line.put("trailing_bytes", bytes.length - used);
        out.print(JSON.writeValueAsString(line) + "\n");
        return line;
    }

    private static void describe(RecordBatch batch, ObjectNode node) {
        node.put("base_offset", batch.baseOffset()).put("last_offset", batch.lastOffset());
        node.put("producer_id", batch.producerId()).put("epoch", batch.producerEpoch()).put("sequence", batch.baseSequence());
        node.put("is_transactional", batch.isTransactional()).put("is_control", batch.isControlBatch());
        node.put("timestamp_type", batch.timestampType().name).put("crc_valid", batch.isValid());
        node.put("magic", batch.magic()).put("codec", batch.compressionType().name);
        node.put("size", batch.sizeInBytes()).put("crc", batch.checksum()).put("leader_epoch", batch.partitionLeaderEpoch());
        node.put("last_sequence", batch.lastSequence()).put("max_timestamp", batch.maxTimestamp());
        var horizon = batch.deleteHorizonMs();
        node.put("delete_horizon", horizon.isPresent() ? (Long) horizon.getAsLong() : null);
        ArrayNode records = node.putArray("records");
        for (Record record : batch) {
            ObjectNode one = records.addObject();
            one.put("offset", record.offset()).put("timestamp", record.timestamp());
            one.put("key", base64(record.key())).put("value", base64(record.value()));
            ArrayNode headers = one.putArray("headers");
            for (Header header : record.headers()) headers.addArray().add(header.key()).add(base64(header.value()));
        }
    }

    private static String base64(ByteBuffer buffer) {
        if (buffer == null) return null;
        byte[] bytes = new byte[buffer.remaining()];
        buffer.duplicate().get(bytes);
        return base64(bytes);
    }

    private static String base64(byte[] bytes) {
        return bytes == null ? null : Base64.getEncoder().encodeToString(bytes);
    }

    private static void checkAgainst(Draft draft, ObjectNode line, String name) {
        List<JsonNode> read = new ArrayList<>();
        for (JsonNode batch : line.get("batches")) {
            require(batch.get("crc_valid").asBoolean(), name + ": the checksum is wrong");
            batch.get("records").forEach(read::add);
        }
        require(read.size() == draft.entries.size(), name + ": another number of records");
        for (int i = 0; i < read.size(); i++) {
            Entry entry = draft.entries.get(i);
            ObjectNode expected = JSON.createObjectNode();
            boolean stamped = draft.timestampType == TimestampType.LOG_APPEND_TIME;
            expected.put("offset", entry.offset);
            expected.put("timestamp", draft.magic == 0 ? -1 : stamped ? draft.logAppendTime : entry.timestamp);
            expected.put("key", base64(entry.key)).put("value", base64(entry.value));
            ArrayNode headers = expected.putArray("headers");
            for (Header header : entry.headers) headers.addArray().add(header.key()).add(base64(header.value()));
            require(expected.equals(read.get(i)), name + ": record " + i + " reads as " + read.get(i));
        }
    }
}
