package kproxy.tools;

import static kproxy.tools.Official.JSON;
import static kproxy.tools.Official.require;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.File;
import java.lang.reflect.Method;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collection;
import java.util.Comparator;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import java.util.jar.JarFile;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.common.errors.RetriableException;
import org.apache.kafka.common.message.ApiMessageType;
import org.apache.kafka.common.protocol.ApiKeys;
import org.apache.kafka.common.protocol.ByteBufferAccessor;
import org.apache.kafka.common.protocol.Errors;
import org.apache.kafka.common.protocol.Message;
import org.apache.kafka.common.requests.AbstractResponse;

/**
 * All that one release of Kafka says of its protocol, version by version: the messages of every API, every other generated
 * message, which answers leave before the connection is muted, and the error codes.
 *
 * <p>Arguments: the directory of the release's jars, the file to write.
 */
public final class Dump {
    /** Enums that tell which messages are the keys and values of which of the brokers' own logs. */
    private static final Map<String, String> RECORD_TYPES = new LinkedHashMap<>();

    static {
        RECORD_TYPES.put("org.apache.kafka.coordinator.group.generated.CoordinatorRecordType", "__consumer_offsets");
        RECORD_TYPES.put("org.apache.kafka.coordinator.transaction.generated.CoordinatorRecordType", "__transaction_state");
        RECORD_TYPES.put("org.apache.kafka.coordinator.share.generated.CoordinatorRecordType", "__share_group_state");
        RECORD_TYPES.put("org.apache.kafka.common.metadata.MetadataRecordType", "__cluster_metadata");
        RECORD_TYPES.put("org.apache.kafka.server.log.remote.metadata.storage.generated.MetadataRecordType",
            "__remote_log_metadata");
    }

    private final Set<Class<?>> ofApis = new HashSet<>();

    public static void main(String[] args) throws Exception {
        var dump = new Dump();
        ObjectNode all = JSON.createObjectNode();
        all.set("apis", dump.apis());
        all.set("data", dump.data(new File(args[0])));
        all.set("errors", errors());
        JSON.writerWithDefaultPrettyPrinter().writeValue(new File(args[1]), all);
    }

    private ArrayNode apis() throws ReflectiveOperationException {
        ArrayNode apis = JSON.createArrayNode();
        for (ApiMessageType api : ApiMessageType.values()) {
            ObjectNode node = apis.addObject();
            node.put("key", api.apiKey()).put("name", api.name);
            node.put("lowest", api.lowestSupportedVersion()).put("highest", api.highestSupportedVersion(true));
            node.put("latest_unstable", api.latestVersionUnstable());
            ArrayNode listeners = node.putArray("listeners");
            api.listeners().stream().map(l -> l.name().toLowerCase(Locale.ROOT)).sorted().forEach(listeners::add);
            Class<?> request = Official.classOf(api::newRequest);
            if (request == null) continue;
            Class<?> response = Official.classOf(api::newResponse);
            ofApis.addAll(List.of(request, response));
            node.set("request", versions(request, api::requestHeaderVersion));
            node.set("response", versions(response, api::responseHeaderVersion));
            node.set("throttled_after_answer", throttledAfterAnswer(api));
        }
        return apis;
    }

    private interface HeaderVersion {
        short of(short version);
    }

    private static ObjectNode versions(Class<?> type, HeaderVersion header) throws ReflectiveOperationException {
        ObjectNode versions = JSON.createObjectNode();
        for (short version = Official.lowest(type); version <= Official.highest(type); version++) {
            ObjectNode node = versions.putObject(Short.toString(version));
            if (header != null) node.put("header_version", header.of(version));
            struct(node, Layout.of(type, version));
        }
        return versions;
    }

    static void struct(ObjectNode node, Layout layout) throws ReflectiveOperationException {
        node.put("flexible", layout.flexible);
        ArrayNode fields = node.putArray("fields");
        Object defaults = layout.type.getConstructor().newInstance();
        for (Layout.Member member : layout.members()) {
            ObjectNode field = fields.addObject();
            field.put("name", member.name).put("type", (member.array ? "[]" : "") + member.type);
            field.put("nullable", member.nullable);
            if (member.tag != null) field.put("tag", member.tag);
            if (member.compact != null) field.put("compact", member.compact);
            JsonNode value = unlessZero(member, member.access.get(defaults));
            if (value != null) field.set("default", value);
            if (member.struct != null) struct(field, member.struct);
        }
    }

    /** The default where it is not the type's zero; null: it is. Of records the zero is null. */
    private static JsonNode unlessZero(Layout.Member member, Object value) throws ReflectiveOperationException {
        if (value == null) return member.type.equals("records") ? null : JSON.nullNode();
        if (member.array) {
            require(((Collection<?>) value).isEmpty(), member.name + ": an array with a default");
            return null;
        }
        if (member.struct != null) {
            require(value.equals(member.struct.type.getConstructor().newInstance()), member.name + ": a struct with a default");
            return null;
        }
        if (value instanceof Boolean flag) return flag ? JSON.valueToTree(true) : null;
        if (value instanceof Double number) return number == 0 ? null : JSON.valueToTree(number);
        if (value instanceof Number number) return number.longValue() == 0 ? null : JSON.valueToTree(number.longValue());
        if (value instanceof String text) return text.isEmpty() ? null : JSON.valueToTree(text);
        if (value instanceof Uuid id) return id.equals(Uuid.ZERO_UUID) ? null : JSON.valueToTree(id.toString());
        require(member.type.equals("bytes"), member.name + ": a default of type " + member.type);
        require(value instanceof byte[] bytes ? bytes.length == 0 : !((java.nio.ByteBuffer) value).hasRemaining(),
            member.name + ": bytes with a default");
        return null;
    }

    /** KIP-219: true for the versions of which a throttled answer leaves at once. */
    private static ObjectNode throttledAfterAnswer(ApiMessageType api) throws ReflectiveOperationException {
        Method parse = Arrays.stream(AbstractResponse.class.getMethods())
            .filter(m -> m.getName().equals("parseResponse") && m.getParameterCount() == 3)
            .filter(m -> m.getParameterTypes()[0] == ApiKeys.class)
            .findFirst().orElseThrow();
        ObjectNode versions = JSON.createObjectNode();
        for (short version = api.lowestSupportedVersion(); version <= api.highestSupportedVersion(true); version++) {
            var buffer = java.nio.ByteBuffer.wrap(Official.write(api.newResponse(), version));
            Object readable = parse.getParameterTypes()[1] == java.nio.ByteBuffer.class ? buffer : new ByteBufferAccessor(buffer);
            var response = (AbstractResponse) parse.invoke(null, ApiKeys.forId(api.apiKey()), readable, version);
            versions.put(Short.toString(version), response.shouldClientThrottle(version));
        }
        return versions;
    }

    /** Every generated message that is of no API, found by its JSON converter, as no list has them all. */
    private ArrayNode data(File libs) throws Exception {
        List<ObjectNode> messages = new ArrayList<>();
        for (File jar : libs.listFiles((dir, name) -> name.startsWith("kafka") && name.endsWith(".jar"))) {
            try (var entries = new JarFile(jar)) {
                for (var entry : (Iterable<java.util.jar.JarEntry>) entries.stream()::iterator) {
                    String name = entry.getName();
                    String suffix = "JsonConverter.class";
                    if (!name.startsWith("org/apache/kafka/") || !name.endsWith(suffix) || name.contains("$")) continue;
                    var type = Class.forName(name.substring(0, name.length() - suffix.length()).replace('/', '.'));
                    require(Message.class.isAssignableFrom(type), type + " is no message");
                    if (ofApis.contains(type)) continue;
                    ObjectNode node = JSON.createObjectNode();
                    node.put("class", type.getSimpleName()).put("package", type.getPackageName());
                    node.set("versions", versions(type, null));
                    messages.add(node);
                }
            }
        }
        for (var entry : RECORD_TYPES.entrySet()) placeInLog(messages, entry.getKey(), entry.getValue());
        messages.sort(Comparator.comparing((ObjectNode n) -> n.get("package").asText()).thenComparing(n -> n.get("class").asText()));
        return JSON.createArrayNode().addAll(messages);
    }

    private static void placeInLog(List<ObjectNode> messages, String enumName, String log) throws ReflectiveOperationException {
        Class<?> types;
        try {
            types = Class.forName(enumName);
        } catch (ClassNotFoundException e) {
            return; // older than the enum
        }
        for (Object type : types.getEnumConstants()) {
            int id = ((Number) types.getMethod("id").invoke(type)).intValue();
            for (Method factory : types.getMethods()) {
                String role = switch (factory.getName()) {
                    case "newRecordKey" -> "key";
                    case "newRecordValue", "newMetadataRecord" -> "value";
                    default -> null;
                };
                if (role == null) continue;
                Class<?> message = factory.invoke(type).getClass();
                for (ObjectNode node : messages)
                    if (message.getName().equals(node.get("package").asText() + "." + node.get("class").asText()))
                        node.put("log", log).put("role", role).put("record_type", id);
            }
        }
    }

    /** [code, name, may the client try again, the exception's message]. */
    private static ArrayNode errors() {
        ArrayNode errors = JSON.createArrayNode();
        Arrays.stream(Errors.values()).sorted(Comparator.comparingInt(Errors::code)).forEach(error -> errors.addArray()
            .add(error.code()).add(error.name()).add(error.exception() instanceof RetriableException)
            .add(error == Errors.NONE ? null : error.message()));
        return errors;
    }
}
