package kproxy.tools;

import static kproxy.tools.Official.JSON;
import static kproxy.tools.Official.require;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.File;
import java.io.PrintStream;
import java.nio.ByteBuffer;
import java.util.Arrays;
import java.util.Comparator;
import java.util.HashSet;
import java.util.HexFormat;
import java.util.Set;
import org.apache.kafka.common.message.ApiMessageType;
import org.apache.kafka.common.message.RequestHeaderData;
import org.apache.kafka.common.message.ResponseHeaderData;
import org.apache.kafka.common.protocol.ApiMessage;
import org.apache.kafka.common.protocol.Message;
import org.apache.kafka.common.protocol.MessageUtil;

/**
 * Frames of every API, side and version, and of the messages in the brokers' own topics, a JSON object a line: the bytes as hex
 * and the body as the official JSON. Every frame was read, written again, and made from its JSON by the official library.
 *
 * <p>Arguments: the release, the seed, the number of frames of each kind, the file to write, and, for an older release, the dump
 * of the newer one, whose versions are left to that one.
 */
public final class WriteVectors {
    private static final String[] CLIENT_IDS = {null, "", "oracle-client", "клиент-1", "a", "consumer-1"};
    private static final String[] COORDINATORS = {"group", "transaction", "share"};
    private static final String[] LOGS = {"__consumer_offsets", "__transaction_state", "__share_group_state"};

    private final String release;
    private final long seed;
    private final int count;
    private final PrintStream out;

    private WriteVectors(String release, long seed, int count, PrintStream out) {
        this.release = release;
        this.seed = seed;
        this.count = count;
        this.out = out;
    }

    public static void main(String[] args) throws Exception {
        try (var out = new PrintStream(args[3], "UTF-8")) {
            var vectors = new WriteVectors(args[0], Long.parseLong(args[1]), Integer.parseInt(args[2]), out);
            vectors.apis(args.length > 4 ? versionsIn(new File(args[4])) : Set.of());
            if (args.length == 4) vectors.logs();
            require(!out.checkError(), "writing failed");
        }
    }

    private static Set<String> versionsIn(File dump) throws Exception {
        Set<String> versions = new HashSet<>();
        for (JsonNode api : JSON.readTree(dump).get("apis"))
            for (String side : new String[] {"request", "response"})
                if (api.has(side)) api.get(side).fieldNames().forEachRemaining(v -> versions.add(api.get("key") + side + v));
        return versions;
    }

    private void apis(Set<String> known) throws Exception {
        var apis = ApiMessageType.values();
        Arrays.sort(apis, Comparator.comparingInt(ApiMessageType::apiKey));
        for (ApiMessageType api : apis) {
            Class<?> request = Official.classOf(api::newRequest);
            if (request == null) continue;
            for (Class<?> type : new Class<?>[] {request, Official.classOf(api::newResponse)}) {
                String side = type == request ? "request" : "response";
                for (short version = Official.lowest(type); version <= Official.highest(type); version++)
                    if (!known.contains(api.apiKey() + side + version)) frames(api, type, side, version);
            }
        }
    }

    private void frames(ApiMessageType api, Class<?> type, String side, short version) throws Exception {
        boolean isRequest = side.equals("request");
        var layout = Layout.of(type, version);
        short headerVersion = isRequest ? api.requestHeaderVersion(version) : api.responseHeaderVersion(version);
        for (int index = 0; index < count; index++) {
            var messages = new RandomMessages(seed, api.name, side, version, index);
            Message body = messages.next(layout);
            var random = messages.random;
            int correlationId = random.nextInt(8) == 0 ? random.nextBoolean() ? Integer.MAX_VALUE : -1 : random.nextInt(1_000_000);
            String clientId = isRequest && headerVersion > 0 ? CLIENT_IDS[random.nextInt(CLIENT_IDS.length)] : null;
            Message header = isRequest ? requestHeader(api, version, headerVersion, correlationId, clientId)
                : new ResponseHeaderData().setCorrelationId(correlationId);
            byte[] head = Official.write(header, headerVersion);
            byte[] frame = Batches.joined(head, Official.write(body, version));
            require(Official.read(header.getClass(), ByteBuffer.wrap(head), headerVersion).equals(header), "the header reads differently");

            ObjectNode line = JSON.createObjectNode();
            line.put("api_key", api.apiKey()).put("api", api.name).put("dir", side).put("version", version);
            line.put("header_version", headerVersion).put("correlation_id", correlationId).put("client_id", clientId);
            finish(line, index, frame, head.length, body, layout, version);
        }
    }

    private static Message requestHeader(ApiMessageType api, short version, short headerVersion, int correlationId, String clientId) {
        var header = new RequestHeaderData().setRequestApiKey(api.apiKey()).setRequestApiVersion(version)
            .setCorrelationId(correlationId);
        return headerVersion > 0 ? header.setClientId(clientId) : header;
    }

    /** Messages behind an int16: the consumer protocol, and the records of coordinators. */
    private void logs() throws Exception {
        for (String name : new String[] {"ConsumerProtocolSubscription", "ConsumerProtocolAssignment"})
            prefixed(Class.forName("org.apache.kafka.common.message." + name), null, null, -1);
        for (int i = 0; i < COORDINATORS.length; i++) {
            var types = Class.forName("org.apache.kafka.coordinator." + COORDINATORS[i] + ".generated.CoordinatorRecordType");
            for (Object type : types.getEnumConstants()) {
                int id = ((Number) types.getMethod("id").invoke(type)).intValue();
                prefixed(types.getMethod("newRecordKey").invoke(type).getClass(), LOGS[i], "key", id);
                prefixed(types.getMethod("newRecordValue").invoke(type).getClass(), LOGS[i], "value", id);
            }
        }
    }

    private void prefixed(Class<?> type, String log, String role, int recordType) throws Exception {
        boolean isKey = "key".equals(role);
        String name = type.getSimpleName();
        for (short version = Official.lowest(type); version <= Official.highest(type); version++) {
            var layout = Layout.of(type, version);
            for (int index = 0; index < count; index++) {
                Message body = new RandomMessages(seed, name, "data", version, index).next(layout);
                byte[] frame = isKey
                    ? (byte[]) MessageUtil.class.getMethod("toCoordinatorTypePrefixedBytes", ApiMessage.class).invoke(null, body)
                    : MessageUtil.toVersionPrefixedBytes(version, body);
                require(ByteBuffer.wrap(frame).getShort() == (isKey ? recordType : version), name + ": an unexpected prefix");
                ObjectNode line = JSON.createObjectNode();
                line.putNull("api_key").put("api", name).put("dir", "data").put("version", version);
                line.putNull("header_version").putNull("correlation_id").putNull("client_id");
                line.put("prefix", isKey ? "int16 record type" : "int16 version");
                if (log != null) line.put("log", log).put("role", role).put("record_type", recordType);
                finish(line, index, frame, 2, body, layout, version);
            }
        }
    }

    private void finish(ObjectNode line, int index, byte[] frame, int start, Message body, Layout layout, short version)
            throws Exception {
        JsonNode json = Official.json(layout, body, version);
        byte[] bytes = Arrays.copyOfRange(frame, start, frame.length);
        var buffer = ByteBuffer.wrap(frame, start, bytes.length);
        Message read = Official.read(layout.type, buffer, version);
        String what = layout.type.getSimpleName() + " v" + version;
        require(!buffer.hasRemaining() && read.equals(body), what + " reads differently");
        require(Arrays.equals(Official.write(read, version), bytes), what + " writes differently");
        JsonNode asText = JSON.readTree(JSON.writeValueAsString(json));
        require(Arrays.equals(Official.write(Official.fromJson(layout.type, asText, version), version), bytes), what + " differs from its JSON");

        line.put("index", index).put("kafka", release).put("hex", HexFormat.of().formatHex(frame)).set("json", json);
        out.print(JSON.writeValueAsString(line) + "\n");
    }
}
